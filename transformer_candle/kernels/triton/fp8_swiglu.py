"""SwiGLU that rounds its results to fp8, for recipes with one scale per square: swiglu.py followed by fp8.py.

    a = gate sigmoid(gate) up                                  forward writes fp8(a) and its transpose, as requested
    [dgate | dup] = the gradients of gate and up               backward writes fp8 of them and of their transpose,
                                                               and fp8 of the transpose of a, computed again

The formulas are those of swiglu.py and the rounding is that of fp8.py, and so is every bit of the codes and the scales:
a result in f32 is rounded to bf16 before it is rounded to fp8. The down projection reads a, and the gradient of its
weight the transpose of a; the gradients of the gate and up projections' input and weight read [dgate | dup] and its
transpose. gate_up and dout are not overwritten.

I must be a multiple of 128, so that no tile has columns of both gate and up and the tiles of dup are those of dgate
moved by I / 128 in a matrix of 2 I columns. N must be a multiple of 16.

A program has a tile of the activation, and of gate and up at the same place. Grid of both directions:

    mx       (4 * (N / 128), I / 128), tiles of 32 x 128; the last tiles may be below row N and write padding of scales
    blocks   (N / 128, I / 128), tiles of 128 x 128

Legend: N rows, I intermediate size (width).

Bytes per element of the activation: forward reads 4 and writes 1 per output, where swiglu.py and fp8.py read 6 and
write 2 more. Backward reads 6 and writes 5, two codes for each of gate and up and one for the activation, where those
read 12 and write 11.
"""

import triton
import triton.language as tl
from declaration import Kernel
from fp8 import MATRIX, TILE, TRANSPOSE, bf16_bits, load_tile, quantize
from swiglu import activation, gradients, sigmoid

# The halves of an integer of 32 bits that holds two bf16 numbers.
UPPER_HALF = tl.constexpr(-0x10000)
LOWER_HALF = tl.constexpr(0xFFFF)


@triton.jit
def fp8_swiglu(gate_up, out, out_transposed, scales, scales_transposed, rows, width, outputs, SQUARE: tl.constexpr):
    """Write the activation [N, I] in fp8, its transpose [I, N], or both, by the bits of `outputs`."""
    first, second = tl.program_id(0), tl.program_id(1)
    gate = load_tile(gate_up, first, second, rows, 2 * width, SQUARE)
    up = load_tile(gate_up, first, width // TILE + second, rows, 2 * width, SQUARE)
    bits = bf16_bits(activation(gate, sigmoid(gate), up))
    quantize(bits, out, out_transposed, scales, scales_transposed, first, second, rows, width, outputs, SQUARE)


@triton.jit
def fp8_swiglu_backward(
    gate_up,
    dout,
    dgate_up,
    dgate_up_transposed,
    dscales,
    dscales_transposed,
    activated_transposed,
    activated_scales,
    rows,
    width,
    SQUARE: tl.constexpr,
):
    """Write [dgate | dup] [N, 2 I], its transpose [2 I, N] and the transpose of the activation [I, N] in fp8."""
    first, second = tl.program_id(0), tl.program_id(1)
    gate = load_tile(gate_up, first, second, rows, 2 * width, SQUARE)
    up = load_tile(gate_up, first, width // TILE + second, rows, 2 * width, SQUARE)
    gradient = load_tile(dout, first, second, rows, width, SQUARE)
    s = sigmoid(gate)
    dgate, dup = gradients(gate, s, up, gradient)
    # One tile at a time is rounded to fp8: first the activation, while the gradients wait in the registers of one tile,
    # dgate in the upper and dup in the lower half of 32 bits. Without the loop the compiler would undo the packing and
    # keep both in f32, for which there are not enough registers.
    pair = bf16_bits(dgate) | ((bf16_bits(dup) >> 16) & LOWER_HALF)
    quantize(
        bf16_bits(activation(gate, s, up)),
        activated_transposed,
        activated_transposed,
        activated_scales,
        activated_scales,
        first,
        second,
        rows,
        width,
        TRANSPOSE,
        SQUARE,
    )
    for half in range(2):
        quantize(
            pair & UPPER_HALF,
            dgate_up,
            dgate_up_transposed,
            dscales,
            dscales_transposed,
            first,
            half * (width // TILE) + second,
            rows,
            2 * width,
            MATRIX | TRANSPOSE,
            SQUARE,
        )
        pair = pair << 16


# Warps are as many as it takes not to spill registers. Forward has 32 elements per thread in at most 64 registers.
# Backward has 16 for squares of 128, since a block of 1,024 threads leaves a thread 64 registers, and 32 for squares of
# 32: ptxas would take up to 184 registers, but 128 suffice, and let four blocks fit on a multiprocessor instead of two.
GATE_UP, CODES = {"gate_up": "*bf16:16"}, "*u8:16"
SIZES = {"rows": "i32:16", "width": "i32:16"}
KERNELS = []
for recipe, square, scales in (("mx", 32, "*u8:16"), ("blocks", 128, "*fp32:16")):
    KERNELS += [
        Kernel(
            f"fp8_swiglu_{recipe}.bf16",
            fp8_swiglu,
            arguments={
                **GATE_UP,
                "out": CODES,
                "out_transposed": CODES,
                "scales": scales,
                "scales_transposed": scales,
                **SIZES,
                "outputs": "i32",
            },
            constants={"SQUARE": square},
            num_warps=4 if recipe == "mx" else 16,
        ),
        Kernel(
            f"fp8_swiglu_backward_{recipe}.bf16",
            fp8_swiglu_backward,
            arguments={
                **GATE_UP,
                "dout": "*bf16:16",
                "dgate_up": CODES,
                "dgate_up_transposed": CODES,
                "dscales": scales,
                "dscales_transposed": scales,
                "activated_transposed": CODES,
                "activated_scales": scales,
                **SIZES,
            },
            constants={"SQUARE": square},
            num_warps=4 if recipe == "mx" else 32,
            max_registers=128 if recipe == "mx" else None,
        ),
    ]
