"""Adds one flat f32 buffer to another. Per element: two loads and a store of 4 bytes, and one addition.

Every element is rounded once, so that the sum has the bits of a CPU's.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def accumulate_forward(sum, addend, elements, BLOCK: tl.constexpr):
    """Compute `sum += addend` for a block of BLOCK elements. Grid: (elements / BLOCK)."""
    start = tl.program_id(0) * BLOCK
    index = start + tl.arange(0, BLOCK)
    # Only the last block may be partial. The others load without a mask, 16 bytes at once: with one the compiler would
    # load elements one by one, as nothing is known of `elements`.
    if start + BLOCK <= elements:
        tl.store(sum + index, tl.load(sum + index) + tl.load(addend + index))
    else:
        inside = index < elements
        total = tl.load(sum + index, mask=inside, other=0.0) + tl.load(addend + index, mask=inside, other=0.0)
        tl.store(sum + index, total, mask=inside)


# 2,048 f32 over 128 threads are four loads of 16 bytes per thread and buffer.
KERNELS = [
    Kernel(
        "accumulate_forward.f32",
        accumulate_forward,
        arguments={"sum": "*fp32:16", "addend": "*fp32:16", "elements": "i32"},
        constants={"BLOCK": 2048},
    )
]
