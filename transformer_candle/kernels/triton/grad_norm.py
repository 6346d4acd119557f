"""The global norm of the gradients, and what clipping makes of it.

Squares are taken and added in F64, as on a CPU: no gradient that F32 holds overflows or vanishes. By the number of
their F64 units, cards for desktops need about as long for that as for reading the gradients, 4 bytes each.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def squares(values):
    """In F64."""
    wide = values.to(tl.float64)
    return wide * wide


@triton.jit
def grad_norm_squares(grads, partials, elements, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """The sum of the squares of a piece a program, into the F64 `partials`."""
    piece = tl.program_id(0)
    start = piece * PIECE
    sums = tl.zeros([BLOCK], tl.float64)
    if start + PIECE <= elements:
        for offset in range(0, PIECE, BLOCK):
            sums += squares(tl.load(grads + start + offset + tl.arange(0, BLOCK)))
    else:
        for offset in range(0, PIECE, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            sums += squares(tl.load(grads + at, mask=at < elements, other=0.0))
    tl.store(partials.to(tl.pointer_type(tl.float64)) + piece, tl.sum(sums, 0))


@triton.jit
def grad_norm_total(partials, norm, pieces, BLOCK: tl.constexpr):
    """One program: the root of the sum of all pieces' sums."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, pieces, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        place = partials.to(tl.pointer_type(tl.float64)) + piece
        sums += tl.load(place, mask=piece < pieces, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(sums, 0)).to(tl.float32))


@triton.jit
def grad_norm_clip(norm, limit, scalars, CLIP_SCALE: tl.constexpr, APPLY: tl.constexpr):
    """One program: the optimizer's two scalars. Without a limit, `limit` is infinite."""
    value = tl.load(norm)
    divisor = value + 1e-6
    tl.store(scalars + CLIP_SCALE, tl.where(limit < divisor, tl.div_rn(limit, divisor), 1.0))
    tl.store(scalars + APPLY, tl.where(tl.abs(value) < float("inf"), 1.0, 0.0))


KERNELS = [
    Kernel(
        "grad_norm_squares.f32",
        grad_norm_squares,
        arguments={"grads": "*fp32:16", "partials": "*fp32:16", "elements": "i32"},
        constants={"BLOCK": 2048, "PIECE": 32768},
    ),
    Kernel(
        "grad_norm_total.f32",
        grad_norm_total,
        arguments={"partials": "*fp32:16", "norm": "*fp32", "pieces": "i32"},
        constants={"BLOCK": 2048},
        num_warps=16,
    ),
    Kernel(
        "grad_norm_clip.f32",
        grad_norm_clip,
        arguments={"norm": "*fp32", "limit": "fp32", "scalars": "*fp32"},
        constants={"CLIP_SCALE": 3, "APPLY": 4},
        num_warps=1,
    ),
]
