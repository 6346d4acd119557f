"""SwiGLU on packed rows [gate | up] (Shazeer, arXiv:2002.05202, equation 5), forward and backward.

    s = sigmoid(gate)                       out = gate s up
    dgate = dout up s (1 + gate (1 - s))    dup = dout gate s

Each program has a block of columns of a row, grid (N, I / BLOCK). Backward overwrites gate and up by their gradients
and, recomputing, dout by `out`, which the gradient of the down projection's weight needs: that reads no more bytes.

Legend: N rows, I intermediate size.

Bytes per row, in units of I elements: forward 3, backward 5, backward_recomputing 6.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def sigmoid(x):
    """Return `1 / (1 + exp(-x))`: exp overflows to infinity for small x, which gives 0, and underflows for large x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation(gate, s, up):
    """Return `gate s up`, for s = sigmoid(gate), multiplied in this order: recomputing gives the same bits."""
    return gate * s * up


@triton.jit
def gradients(gate, s, up, gradient):
    """Return the gradients of gate and of up, for s = sigmoid(gate) and the gradient of the activation."""
    dgate = gradient * up * s * (1.0 + gate * (1.0 - s))
    dup = gradient * gate * s
    return dgate, dup


@triton.jit
def swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    """Compute `out = gate * sigmoid(gate) * up`. Grid: (N, I / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)  # N * 2 I elements may exceed 2^31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_offset = row * (2 * width) + column
    gate = tl.load(gate_up + gate_offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_offset + width, mask=inside, other=0.0).to(tl.float32)
    result = activation(gate, sigmoid(gate), up)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gate_up, dout, width, BLOCK: tl.constexpr, RECOMPUTING: tl.constexpr):
    """Overwrite gate and up by their gradients, and dout by `out` where RECOMPUTING. Grid: (N, I / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_offset, out_offset = row * (2 * width) + column, row * width + column
    gate = tl.load(gate_up + gate_offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_offset + width, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dout + out_offset, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    dgate, dup = gradients(gate, s, up, gradient)
    tl.store(gate_up + gate_offset, dgate.to(gate_up.dtype.element_ty), mask=inside)
    tl.store(gate_up + gate_offset + width, dup.to(gate_up.dtype.element_ty), mask=inside)
    if RECOMPUTING:
        tl.store(dout + out_offset, activation(gate, s, up).to(dout.dtype.element_ty), mask=inside)


# 1,024 columns over 128 threads are 8 per thread: one 16-byte access of bf16.
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
