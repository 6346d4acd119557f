"""Cross-entropy on a chunk of logits: losses, and the logits' gradient written over them.

Legend: C rows of a chunk, V padded vocabulary. Logits are F32; only the first `vocab_size` columns count, the padding
has no probability and a gradient of zero.

Bytes moved a logit: 8 read (4 where the row is still in the L2 cache the second time), 2 written as bf16 or 4 as F32.
"""

import triton
import triton.language as tl
from declaration import Kernel

IGNORED = tl.constexpr(-100)
"""A row with this target has no loss and no gradient."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest F32 that is not infinite: its difference from minus infinity is a number."""


@triton.jit
def row_statistics(row, vocab_size, width, BLOCK: tl.constexpr):
    """A row's largest logit, and the sum of `exp(logit - largest)`: every lane keeps its own two numbers."""
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row + column, mask=column < width, other=float("-inf"))
        logit = tl.where(column < vocab_size, logit, float("-inf"))
        larger = tl.maximum(largest, logit)
        total = total * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp(largest - top), 0)


@triton.jit
def row_loss(own, largest, total, target, vocab_size):
    """The loss in nats; 0 where the target is ignored, NaN where it is no target."""
    known = (target >= 0) & (target < vocab_size)
    loss = tl.where(known, tl.log(total) - (own - largest), float("nan"))
    return tl.where(target == IGNORED, 0.0, loss)


@triton.jit
def own_logit(row, target, vocab_size):
    """The target's logit, and the first one where there is no such target."""
    return tl.load(row + tl.where((target >= 0) & (target < vocab_size), target, 0))


@triton.jit
def head_cross_entropy_losses(logits, targets, losses, vocab_size, width, BLOCK: tl.constexpr):
    """A row a program."""
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * width
    target = tl.load(targets + at)
    own = own_logit(row, target, vocab_size)
    largest, total = row_statistics(row, vocab_size, width, BLOCK)
    tl.store(losses + at, row_loss(own, largest, total, target, vocab_size))


@triton.jit
def head_cross_entropy_gradients(logits, targets, scale, losses, dlogits, vocab_size, width, BLOCK: tl.constexpr):
    """A row a program, in place: `dlogits` is the memory of `logits`.

    Every row begins where it did, so that a row of bf16 takes the first half of its place. Nothing is overwritten
    unread: the statistics' reductions stand between every thread's first reading of the row and the first writing. In
    F32 each thread then writes over what it has read itself; in bf16 block i is written over logits of blocks up to i,
    which a barrier makes sure that all threads have read.
    """
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * width
    target = tl.load(targets + at)
    own = own_logit(row, target, vocab_size)
    largest, total = row_statistics(row, vocab_size, width, BLOCK)
    loss = row_loss(own, largest, total, target, vocab_size)
    tl.store(losses + at, loss)
    factor = tl.load(scale)
    share = tl.where(loss == loss, factor / total, float("nan"))
    is_narrower: tl.constexpr = dlogits.dtype.element_ty != logits.dtype.element_ty
    written = dlogits + at * (2 * width if is_narrower else width)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        logit = tl.load(row + column, mask=inside, other=float("-inf"))
        gradient = tl.exp(logit - largest) * share
        gradient = tl.where(column == target, gradient - factor, gradient)
        gradient = tl.where((column < vocab_size) & (target != IGNORED), gradient, 0.0)
        if is_narrower:
            tl.debug_barrier()
        tl.store(written + column, gradient.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def head_cross_entropy_total(losses, rows, total, scale, loss, is_first, is_last, BLOCK: tl.constexpr):
    """One program: adds a chunk's losses to the F64 `total`, which the first chunk begins.

    The last chunk adds scale times the total to `loss`, rounded once.
    """
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + row, mask=row < rows, other=0.0).to(tl.float64)
    place = total.to(tl.pointer_type(tl.float64))
    sum_so_far = tl.sum(sums, 0)
    if is_first == 0:
        sum_so_far += tl.load(place)
    tl.store(place, sum_so_far)
    if is_last != 0:
        before = tl.load(loss).to(tl.float64)
        tl.store(loss, (before + tl.load(scale).to(tl.float64) * sum_so_far).to(tl.float32))


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
