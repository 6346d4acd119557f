"""Global norm of the gradients and the clip scale (`torch.nn.utils.clip_grad_norm_`).

    norm = sqrt(sum of g^2)          clip_scale = min(1, limit / (norm + 1e-6))          apply = norm is finite

Two launches with a fixed order instead of atomics: one f64 partial sum per piece of PIECE elements, grid
(elements / PIECE), then one program for the sum of those.

Squares are computed and summed in f64, as on the CPU, so no gradient that f32 holds overflows or underflows. With the
f64 throughput of desktop GPUs that takes about as long as reading the gradients, 4 bytes per element.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def squares(values):
    """Return the squares in f64: exact, as an f32 has 24 bits of mantissa and an f64 53."""
    values_f64 = values.to(tl.float64)
    return values_f64 * values_f64


@triton.jit
def grad_norm_squares(grads, partials, elements, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Write the sum of squares of a piece to the f64 `partials`. Grid: (elements / PIECE)."""
    piece = tl.program_id(0)
    start = piece * PIECE
    sums = tl.zeros([BLOCK], tl.float64)
    # Only the last piece may be partial. The others load without a mask, 16 bytes at once: with one the compiler would
    # load elements one by one, as nothing is known of `elements`.
    if start + PIECE <= elements:
        for offset in range(0, PIECE, BLOCK):
            sums += squares(tl.load(grads + start + offset + tl.arange(0, BLOCK)))
    else:
        for offset in range(0, PIECE, BLOCK):
            index = start + offset + tl.arange(0, BLOCK)
            sums += squares(tl.load(grads + index, mask=index < elements, other=0.0))
    # The launcher's buffers are f32: `partials` has two elements per f64.
    tl.store(partials.to(tl.pointer_type(tl.float64)) + piece, tl.sum(sums, 0))


@triton.jit
def grad_norm_total(partials, norm, pieces, BLOCK: tl.constexpr):
    """Write the square root of the sum over all pieces to `norm`, rounded once to f32. Grid: (1)."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, pieces, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        partial = partials.to(tl.pointer_type(tl.float64)) + piece
        sums += tl.load(partial, mask=piece < pieces, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(sums, 0)).to(tl.float32))


@triton.jit
def grad_norm_clip(norm, limit, scalars, CLIP_SCALE: tl.constexpr, APPLY: tl.constexpr):
    """Store the clip scale and whether the step may be applied. Without clipping `limit` is infinite. Grid: (1)."""
    value = tl.load(norm)
    divisor = value + 1e-6
    # No min(1, quotient): inf / inf would be NaN where nothing is to be clipped.
    tl.store(scalars + CLIP_SCALE, tl.where(limit < divisor, tl.div_rn(limit, divisor), 1.0))
    # NaN compares false too, so neither infinity nor NaN reaches the weights.
    tl.store(scalars + APPLY, tl.where(tl.abs(value) < float("inf"), 1.0, 0.0))


# 2,048 f32 over 128 threads are four loads of 16 bytes per thread; 16 of these blocks per piece leave one partial sum
# per 32,768 elements, which the single program of `grad_norm_total`, with 16 warps, reads in little time.
# CLIP_SCALE and APPLY are the indices into `scalars` of `adamw.py`.
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
