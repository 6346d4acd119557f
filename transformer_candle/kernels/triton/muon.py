"""Muon's element-wise passes around its GEMMs (Jordan et al. 2024; Liu et al., arXiv:2502.16982).

For a weight [M, N] with S = min(M, N), in order of the launches:

    muon_momentum     m = mu m + rest clip_scale grad          x = mu m + rest clip_scale grad        rest = 1 - mu
    muon_squares      one f64 sum of squares per piece of x
    muon_normalize    y = x / max(|x|, 1e-7)
    5 times           A = y y^T and A^2 by cuBLASLt; muon_polynomial: P = a I + b A + c A^2; y = P y by cuBLASLt
    muon_step         w = (1 - rate decay) w - rate scale y                              scale = 0.2 sqrt(max(M, N))

A batch B of equally shaped matrices is contiguous; axis 1 of the grid is the matrix. All passes stream: bytes per
element 14 (f32 x: 16), 2 (4), 4 (8), 10 (16) of the weight's elements, and 6 (12) of the S^2 elements of A per
iteration. Equal inputs give equal bits on GPU and CPU where no sum is involved: no fused multiply-add.
"""

import triton
import triton.language as tl
from adamw import APPLY, CLIP_SCALE, LEARNING_RATE
from cast import call_on_block, join_master, split_master
from declaration import Kernel
from grad_norm import squares


@triton.jit
def momentum_block(arguments, offset, mask):
    """Update the momentum of a block, and write its update x."""
    momentum, grad, update, clip_scale, mu, rest, apply = arguments
    share = rest * (clip_scale * tl.load(grad + offset, mask=mask))
    old = tl.load(momentum + offset, mask=mask)
    value = mu * old + share
    # A select instead of a branch around the stores: the gradient of a step that must not be applied may be NaN.
    tl.store(momentum + offset, tl.where(apply, value, old), mask=mask)
    x = tl.where(apply, mu * value + share, 0.0)
    tl.store(update + offset, x.to(update.dtype.element_ty), mask=mask)


@triton.jit
def muon_momentum(momentum, grad, update, scalars, mu, rest, elements, BLOCK: tl.constexpr):
    """Add a gradient to the momentum of one matrix, and write the update x. Grid: (elements / BLOCK).

    If the gradients' norm is not finite (APPLY is 0) the momentum stays and the update is zero.
    """
    clip_scale, apply = tl.load(scalars + CLIP_SCALE), tl.load(scalars + APPLY) != 0.0
    arguments = (momentum, grad, update, clip_scale, mu, rest, apply)
    call_on_block(momentum_block, arguments, tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def muon_squares(update, partials, elements, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Write the sum of squares of a matrix's piece to the f64 `partials` [B, pieces]. Grid: (elements / PIECE, B)."""
    piece, pieces, matrix = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    # 64 bits: a batch may have more than 2^31 elements.
    update += matrix.to(tl.int64) * elements
    start = piece * PIECE
    sums = tl.zeros([BLOCK], tl.float64)
    # Only the last piece may be partial, see `grad_norm_squares`.
    if start + PIECE <= elements:
        for offset in range(0, PIECE, BLOCK):
            sums += squares(tl.load(update + start + offset + tl.arange(0, BLOCK)))
    else:
        for offset in range(0, PIECE, BLOCK):
            index = start + offset + tl.arange(0, BLOCK)
            sums += squares(tl.load(update + index, mask=index < elements, other=0.0))
    tl.store(partials.to(tl.pointer_type(tl.float64)) + matrix * pieces + piece, tl.sum(sums, 0))


@triton.jit
def scale_block(arguments, offset, mask):
    """Compute `target = scale source` of a block."""
    source, target, scale = arguments
    value = scale * tl.load(source + offset, mask=mask).to(tl.float32)
    tl.store(target + offset, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def muon_normalize(source, target, partials, elements, SUMS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Compute `target = source / max(|source|, 1e-7)` from `muon_squares`' partial sums. Grid: (elements / PIECE, B).

    Every program adds the partial sums of its matrix once more, in the same order: 352 of them for 11.5 million
    elements, which the L2 cache holds, and no launch is needed in between.
    """
    pieces, matrix = tl.num_programs(0), tl.program_id(1)
    sums = tl.zeros([SUMS], tl.float64)
    for first in range(0, pieces, SUMS):
        index = first + tl.arange(0, SUMS)
        partial = partials.to(tl.pointer_type(tl.float64)) + matrix * pieces + index
        sums += tl.load(partial, mask=index < pieces, other=0.0)
    norm = tl.sqrt(tl.sum(sums, 0))
    scale = (1.0 / tl.maximum(norm, 1e-7)).to(tl.float32)
    begin = matrix.to(tl.int64) * elements
    arguments = (source + begin, target + begin, scale)
    piece = tl.program_id(0) * PIECE
    for start in range(piece, min(piece + PIECE, elements), BLOCK):
        call_on_block(scale_block, arguments, start, elements, BLOCK)


@triton.jit
def polynomial_block(arguments, offset, mask):
    """Write `a I + b gram + c square` of a block over `square`."""
    gram, square, size, a, b, c = arguments
    gram_term = b * tl.load(gram + offset, mask=mask).to(tl.float32)
    # Element i of [S, S] is on the diagonal where i = row S + row.
    gram_term = tl.where(offset % (size + 1) == 0, a + gram_term, gram_term)
    value = gram_term + c * tl.load(square + offset, mask=mask).to(tl.float32)
    tl.store(square + offset, value.to(square.dtype.element_ty), mask=mask)


@triton.jit
def muon_polynomial(gram, square, size, a, b, c, elements, BLOCK: tl.constexpr):
    """Compute the polynomial P of an iteration over A^2, from A and A^2 [B, S, S]. Grid: (S^2 / BLOCK, B)."""
    begin = tl.program_id(1).to(tl.int64) * elements
    arguments = (gram + begin, square + begin, size, a, b, c)
    call_on_block(polynomial_block, arguments, tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def step_block(arguments, offset, mask):
    """Update a block of f32 weights, or of master weights in two halves."""
    weight, low_bits, update, decay, rate = arguments
    is_split: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    value = tl.load(weight + offset, mask=mask)
    if is_split:
        value = join_master(value, tl.load(low_bits + offset, mask=mask))
    value = decay * value - rate * tl.load(update + offset, mask=mask).to(tl.float32)
    if is_split:
        value, low = split_master(value)
        tl.store(low_bits + offset, low, mask=mask)
    tl.store(weight + offset, value, mask=mask)


@triton.jit
def muon_step(weight, low_bits, update, scalars, scale, weight_decay, elements, BLOCK: tl.constexpr):
    """Apply the orthogonalised update to one matrix. Grid: (elements / BLOCK). f32 weights have no `low_bits`."""
    if tl.load(scalars + APPLY) != 0.0:
        rate = tl.load(scalars + LEARNING_RATE).to(tl.float64)
        decay = (1.0 - rate * tl.cast(weight_decay, tl.float64)).to(tl.float32)
        scaled_rate = (rate * tl.cast(scale, tl.float64)).to(tl.float32)
        arguments = (weight, low_bits, update, decay, scaled_rate)
        call_on_block(step_block, arguments, tl.program_id(0) * BLOCK, elements, BLOCK)


def declared(dtype: str, pointer: str, low_bits: str | None) -> list[Kernel]:
    """Return the five kernels for updates of one type; bf16 weights have their low bits beside them."""
    batch = {"elements": "i32"}
    halves = {"weight": pointer, **({"low_bits": low_bits} if low_bits else {})}
    # 1,024 elements over 128 threads are 8 per thread: one 16-byte access of bf16, two of f32.
    return [
        Kernel(
            f"muon_momentum.{dtype}",
            muon_momentum,
            arguments={
                "momentum": "*fp32:16",
                "grad": "*fp32:16",
                "update": pointer,
                "scalars": "*fp32",
                "mu": "fp32",
                "rest": "fp32",
                **batch,
            },
            constants={"BLOCK": 1024},
            fused_multiply_add=False,
        ),
        Kernel(
            f"muon_squares.{dtype}",
            muon_squares,
            arguments={"update": pointer, "partials": "*fp32:16", **batch},
            constants={"BLOCK": 2048, "PIECE": 32768},
        ),
        Kernel(
            f"muon_normalize.{dtype}",
            muon_normalize,
            arguments={"source": pointer, "target": pointer, "partials": "*fp32:16", **batch},
            constants={"SUMS": 512, "BLOCK": 1024, "PIECE": 32768},
        ),
        Kernel(
            f"muon_polynomial.{dtype}",
            muon_polynomial,
            arguments={
                "gram": pointer,
                "square": pointer,
                "size": "i32",
                **dict.fromkeys(("a", "b", "c"), "fp32"),
                **batch,
            },
            constants={"BLOCK": 1024},
            fused_multiply_add=False,
        ),
        Kernel(
            f"muon_step.{dtype}",
            muon_step,
            arguments={
                **halves,
                "update": pointer,
                "scalars": "*fp32",
                "scale": "fp32",
                "weight_decay": "fp32",
                **batch,
            },
            constants={**({} if low_bits else {"low_bits": None}), "BLOCK": 1024},
            fused_multiply_add=False,
        ),
    ]


KERNELS = [*declared("f32", "*fp32:16", None), *declared("bf16", "*bf16:16", "*i16:16")]
