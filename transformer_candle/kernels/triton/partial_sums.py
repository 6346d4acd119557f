"""The second half of a sum over rows without atomics, whose order would differ from run to run.

The operation's own launch has `parts` programs, each of which writes the sum of every `parts`-th row (or block of rows)
to its row of `partials`. `add_partial_sums` then adds up those rows, ROWS of them at a time.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def add_partial_sums(partials, sums, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows of `partials` to a block of columns of `sums`, always in the same order. Grid: (width / BLOCK)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * width + column[None, :]
        mask = (row < parts)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partials + offset, mask=mask, other=0.0), 0)
    tl.store(sums + column, tl.load(sums + column, mask=inside, other=0.0) + total, mask=inside)


# 32 columns of f32 are one 128-byte line of memory per row, and not more, because there are only width / 32 programs;
# 128 rows give the 128 threads 8 loads of 16 bytes each.
KERNELS = [
    Kernel(
        "add_partial_sums.f32",
        add_partial_sums,
        arguments={"partials": "*fp32:16", "sums": "*fp32:16", "parts": "i32", "width": "i32:16"},
        constants={"ROWS": 128, "BLOCK": 32},
    )
]
