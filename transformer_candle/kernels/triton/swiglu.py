"""SwiGLU on packed rows [gate | up], forward and backward.

Legend: N rows, I intermediate size.

Bytes moved a row, in units of I elements: forward 3, backward 5, backward_recomputing 6.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def sigmoid(x):
    """0 for -inf, 1 for inf."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    """`out = gate * sigmoid(gate) * up`, a block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * (2 * width) + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * sigmoid(gate) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gate_up, dout, width, BLOCK: tl.constexpr, RECOMPUTING: tl.constexpr):
    """Gate and up become their gradients, a block of a row a program; where RECOMPUTING, dout becomes the output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at, place = row * (2 * width) + column, row * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    dgate = gradient * up * s * (1.0 + gate * (1.0 - s))
    dup = gradient * gate * s
    tl.store(gate_up + at, dgate.to(gate_up.dtype.element_ty), mask=inside)
    tl.store(gate_up + at + width, dup.to(gate_up.dtype.element_ty), mask=inside)
    if RECOMPUTING:
        tl.store(dout + place, (gate * s * up).to(dout.dtype.element_ty), mask=inside)


BACKWARD = {"swiglu_backward": False, "swiglu_backward_recomputing": True}
KERNELS = []
for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16")):
    KERNELS.append(
        Kernel(
            f"swiglu_forward.{dtype}",
            swiglu_forward,
            arguments={"gate_up": pointer, "out": pointer, "width": "i32:16"},
            constants={"BLOCK": 1024},
        )
    )
    KERNELS += [
        Kernel(
            f"{name}.{dtype}",
            swiglu_backward,
            arguments={"gate_up": pointer, "dout": pointer, "width": "i32:16"},
            constants={"BLOCK": 1024, "RECOMPUTING": recomputing},
        )
        for name, recomputing in BACKWARD.items()
    ]
