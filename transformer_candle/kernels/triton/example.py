"""y = a x: how a source file declares its kernels."""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def scale_forward(x, y, a, n, BLOCK: tl.constexpr):
    """One block of elements a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, (a * value).to(y.dtype.element_ty), mask=at < n)


KERNELS = [
    Kernel(
        f"scale_forward.{dtype}",
        scale_forward,
        arguments={"x": f"{pointer}:16", "y": f"{pointer}:16", "a": "fp32", "n": "i32:16"},
        constants={"BLOCK": 1024},
        num_warps=4,
    )
    for dtype, pointer in (("bf16", "*bf16"), ("f32", "*fp32"))
]
