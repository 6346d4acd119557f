"""Token embedding: rows of a table by id, and the sum of their gradients in the order of the tokens.

Legend: N tokens, V rows of the table, D columns.

Bytes moved: forward reads and writes a row a token; backward reads a row of gradients a token, and reads and writes an
F32 row of the table for every different id.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def embedding_forward(table, ids, out, rows, width, BLOCK: tl.constexpr):
    """One block of a token's row a program. An id outside of the table gives NaN, so that it shows in the loss."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    inside = column < width
    value = tl.load(table + row * width + column, mask=inside & (row < rows), other=float("nan"))
    tl.store(out + token * width + column, value, mask=inside)


@triton.jit
def embedding_chain(ids, first, following, tokens, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Links the tokens of each id, a block of tokens a program, which it compares with all tokens.

    `first` says whether no earlier token has this one's id, `following` names the next one that has it, or N.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    own = tl.load(ids + token, mask=inside, other=0)[:, None]
    earlier = tl.zeros([BLOCK, SPAN], tl.int32)
    later = tl.zeros([BLOCK, SPAN], tl.int32) + tokens
    for start in range(0, tokens, SPAN):
        other = start + tl.arange(0, SPAN)
        exists = other < tokens
        same = (own == tl.load(ids + other, mask=exists, other=0)[None, :]) & exists[None, :]
        earlier |= (same & (other[None, :] < token[:, None])).to(tl.int32)
        later = tl.where(same & (other[None, :] > token[:, None]), tl.minimum(later, other[None, :]), later)
    tl.store(first + token, 1 - tl.max(earlier, 1), mask=inside)
    tl.store(following + token, tl.min(later, 1), mask=inside)


@triton.jit
def embedding_backward(ids, dout, first, following, dtable, tokens, rows, width, BLOCK: tl.constexpr):
    """The first token of each id adds the gradients of all that have it to the table's row.

    A block of columns a program. Ids outside of the table are left out.
    """
    token = tl.program_id(0)
    row = tl.load(ids + token).to(tl.int64)
    if (tl.load(first + token) != 0) & (row < rows):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.load(dtable + row * width + column, mask=inside, other=0.0)
        while token < tokens:
            gradient = tl.load(dout + token.to(tl.int64) * width + column, mask=inside, other=0.0)
            token = tl.load(following + token)
            total += gradient.to(tl.float32)
        tl.store(dtable + row * width + column, total, mask=inside)


KERNELS = [
    Kernel(
        "embedding_chain.u32",
        embedding_chain,
        arguments={"ids": "*u32", "first": "*i32", "following": "*i32", "tokens": "i32"},
        constants={"BLOCK": 32, "SPAN": 128},
    )
]
for dtype, pointer in (("bf16", "*bf16"), ("f32", "*fp32")):
    KERNELS += [
        Kernel(
            f"embedding_forward.{dtype}",
            embedding_forward,
            arguments={
                "table": f"{pointer}:16",
                "ids": "*u32",
                "out": f"{pointer}:16",
                "rows": "i32",
                "width": "i32:16",
            },
            constants={"BLOCK": 1024},
        ),
        Kernel(
            f"embedding_backward.{dtype}",
            embedding_backward,
            arguments={
                "ids": "*u32",
                "dout": f"{pointer}:16",
                "first": "*i32",
                "following": "*i32",
                "dtable": "*fp32:16",
                "tokens": "i32",
                "rows": "i32",
                "width": "i32:16",
            },
            constants={"BLOCK": 512},
        ),
    ]
