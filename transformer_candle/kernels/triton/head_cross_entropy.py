"""Softmax cross-entropy on a chunk of logits, with the logits' gradient written over them.

    lse = log sum over v < vocab_size of exp(logit_v)          loss = lse - logit_target
    dlogit_v = scale * (exp(logit_v - lse) * (1 + 2 z_loss lse) - (1 if v is the target else 0))

A z-loss z_loss * lse^2 is minimised with the loss and not part of it; see `head_cross_entropy.rs`.

The head computes its logits a chunk of C rows at a time, so that [N, V] never exists; `scale` is 1 / number of targets
of the whole step. One program per row, grid (C), two passes:

    for block of 4,096 columns                           pass 1, online softmax (Milakov and Gimelshein,
      row_max, row_sum per element of the block          arXiv:1805.02867, Algorithm 3), no reduction within the loop
    reduce both over the block; loss
    for block of 4,096 columns                           pass 2
      gradient = exp(logit - row_max) * scale / row_sum  written over the logits

Legend: C rows of a chunk, V columns, the vocabulary padded to `width`. Logits are f32. Only the first `vocab_size`
columns count: the padding has probability 0 and gradient 0.

Bytes per logit: 8 read (4 where the row is still in the L2 cache for pass 2), 2 written as bf16 or 4 as f32.
"""

import triton
import triton.language as tl
from declaration import Kernel

IGNORED = tl.constexpr(-100)
"""A row with this target has no loss and no gradient: PyTorch's default `ignore_index`."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite f32, where row_max starts: a logit of -inf minus it is -inf, whereas -inf - -inf would be NaN."""


@triton.jit
def row_statistics(row, vocab_size, width, BLOCK: tl.constexpr):
    """Return a row's row_max, and row_sum of exp(logit - row_max).

    Each of the BLOCK positions keeps its own two numbers over the row, at two exponentials per logit: reducing once at
    the end is cheaper than a reduction over the threads, with its barriers, in every iteration.
    """
    row_max = tl.full([BLOCK], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # The mask of the load is `width`, a multiple of 16, so that loads stay 16 bytes wide; `vocab_size` need not be.
        logit = tl.load(row + column, mask=column < width, other=float("-inf"))
        logit = tl.where(column < vocab_size, logit, float("-inf"))
        new_max = tl.maximum(row_max, logit)
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.exp(logit - new_max)
        row_max = new_max
    whole_max = tl.max(row_max, 0)
    return whole_max, tl.sum(row_sum * tl.exp(row_max - whole_max), 0)


@triton.jit
def row_loss(target_logit, row_max, row_sum, target, vocab_size):
    """Return the loss in nats; 0 where the target is ignored, NaN where it is neither ignored nor in the vocabulary."""
    in_vocabulary = (target >= 0) & (target < vocab_size)
    # Not (row_max + log(row_sum)) - target_logit: the difference of two logits loses no digits to a large row_max.
    loss = tl.where(in_vocabulary, tl.log(row_sum) - (target_logit - row_max), float("nan"))
    return tl.where(target == IGNORED, 0.0, loss)


@triton.jit
def load_target_logit(row, target, vocab_size):
    """Load the target's logit; for a target outside the vocabulary that of column 0, which nothing uses."""
    return tl.load(row + tl.where((target >= 0) & (target < vocab_size), target, 0))


@triton.jit
def head_cross_entropy_losses(logits, targets, losses, vocab_size, width, BLOCK: tl.constexpr):
    """Compute losses only, for evaluation. Grid: (C)."""
    index = tl.program_id(0).to(tl.int64)  # a chunk's C * V elements may exceed 2^31
    row = logits + index * width
    target = tl.load(targets + index)
    target_logit = load_target_logit(row, target, vocab_size)
    row_max, row_sum = row_statistics(row, vocab_size, width, BLOCK)
    tl.store(losses + index, row_loss(target_logit, row_max, row_sum, target, vocab_size))


@triton.jit
def head_cross_entropy_gradients(
    logits, targets, scale, z_loss, losses, dlogits, vocab_size, width, BLOCK: tl.constexpr
):
    """Compute losses and gradients, in place: `dlogits` is the memory of `logits`. Grid: (C).

    A bf16 row begins where its f32 row does and fills the first half of it. No logit is overwritten before it is read:

    - the reductions of pass 1 are a barrier between every thread's reads there and the first write;
    - in f32 each thread then overwrites what it has read itself in the same iteration;
    - in bf16 block i is written over logits of blocks up to i, which other threads read: hence the barrier.
    """
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * width
    target = tl.load(targets + index)
    target_logit = load_target_logit(row, target, vocab_size)
    row_max, row_sum = row_statistics(row, vocab_size, width, BLOCK)
    loss = row_loss(target_logit, row_max, row_sum, target, vocab_size)
    tl.store(losses + index, loss)
    loss_scale = tl.load(scale)
    z_factor = 1.0 + 2.0 * z_loss * (row_max + tl.log(row_sum))
    # A loss of NaN (an invalid target, a logit of NaN or +inf) makes the whole row's gradient NaN.
    probability_scale = tl.where(loss == loss, loss_scale * z_factor / row_sum, float("nan"))
    is_narrower: tl.constexpr = dlogits.dtype.element_ty != logits.dtype.element_ty
    drow = dlogits + index * (2 * width if is_narrower else width)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        logit = tl.load(row + column, mask=inside, other=float("-inf"))
        gradient = tl.exp(logit - row_max) * probability_scale
        gradient = tl.where(column == target, gradient - loss_scale, gradient)
        # Last, so that a NaN stays out of the padding and of ignored rows.
        gradient = tl.where((column < vocab_size) & (target != IGNORED), gradient, 0.0)
        if is_narrower:
            tl.debug_barrier()
        tl.store(drow + column, gradient.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def head_cross_entropy_total(losses, rows, total, scale, loss, is_first, is_last, BLOCK: tl.constexpr):
    """Add a chunk's losses to the f64 `total`; the last chunk adds scale * total to `loss`. Grid: (1).

    The first chunk overwrites `total`, the others accumulate. In f64, so that the sum is rounded to f32 once however
    many chunks there are; by one program, so that its order is fixed.
    """
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + row, mask=row < rows, other=0.0).to(tl.float64)
    total_f64 = total.to(tl.pointer_type(tl.float64))  # the launcher's buffers are f32: two elements per f64
    sum_so_far = tl.sum(sums, 0)
    if is_first == 0:
        sum_so_far += tl.load(total_f64)
    tl.store(total_f64, sum_so_far)
    if is_last != 0:
        loss_before = tl.load(loss).to(tl.float64)
        tl.store(loss, (loss_before + tl.load(scale).to(tl.float64) * sum_so_far).to(tl.float32))


# 4,096 columns over 8 warps are 16 per thread: four loads of 16 bytes in flight, with the two statistics of each column
# in registers.
KERNELS = [
    Kernel(
        "head_cross_entropy_losses.f32",
        head_cross_entropy_losses,
        arguments={
            "logits": "*fp32:16",
            "targets": "*i32",
            "losses": "*fp32",
            "vocab_size": "i32",
            "width": "i32:16",
        },
        constants={"BLOCK": 4096},
        num_warps=8,
    ),
    Kernel(
        "head_cross_entropy_total.f32",
        head_cross_entropy_total,
        arguments={
            "losses": "*fp32:16",
            "rows": "i32",
            "total": "*fp32:16",
            "scale": "*fp32",
            "loss": "*fp32",
            "is_first": "i32",
            "is_last": "i32",
        },
        constants={"BLOCK": 1024},
    ),
]
KERNELS += [
    Kernel(
        f"head_cross_entropy_gradients.{dtype}",
        head_cross_entropy_gradients,
        arguments={
            "logits": "*fp32:16",
            "targets": "*i32",
            "scale": "*fp32",
            "z_loss": "fp32",
            "losses": "*fp32",
            "dlogits": pointer,
            "vocab_size": "i32",
            "width": "i32:16",
        },
        constants={"BLOCK": 4096},
        num_warps=8,
    )
    for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16"))
]
