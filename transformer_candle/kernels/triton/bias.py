"""The bias of a linear map: added to every row; its gradient is the sum of the rows' gradients.

Legend: N rows of O columns. Sums are f32. Bytes per row: forward twice its elements, backward once; the bias and the
partial sums stay in the L2 cache.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def bias_forward(y, bias, width, BLOCK: tl.constexpr):
    """Add the bias to a block of columns of a row, in place. Grid: (N, O / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)  # N * O elements may exceed 2^31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y_O = tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
    bias_O = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (y_O + bias_O).to(y.dtype.element_ty), mask=inside)


@triton.jit
def bias_backward(dy, partials, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums of a part's rows to a block of columns of its row of `partials`. Grid: (parts, O / BLOCK).

    A part has every `parts`-th block of ROWS rows. `partial_sums.py` adds the parts.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sum_O = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        dy_RO = tl.load(dy + offset, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        sum_O += tl.sum(dy_RO.to(tl.float32), 0)
    tl.store(partials + tl.program_id(0).to(tl.int64) * width + column, sum_O, mask=inside)


# Forward has 8 elements per thread, a 16-byte access of bf16; so has backward in 32 rows of 32 columns, of which each
# row is a 64-byte sector pair of bf16 or a line of f32.
KERNELS = [
    kernel
    for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16"))
    for kernel in (
        Kernel(
            f"bias_forward.{dtype}",
            bias_forward,
            arguments={"y": pointer, "bias": pointer, "width": "i32:16"},
            constants={"BLOCK": 1024},
        ),
        Kernel(
            f"bias_backward.{dtype}",
            bias_backward,
            arguments={"dy": pointer, "partials": "*fp32:16", "rows": "i32", "width": "i32:16"},
            constants={"ROWS": 32, "BLOCK": 32},
        ),
    )
]
