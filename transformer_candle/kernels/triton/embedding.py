"""Token embedding: out[n] = table[ids[n]], and dtable[v] += sum over n with ids[n] = v of dout[n], in the order of n.

Backward is a scatter-add. Atomics would add in an order that changes from run to run, and f32 sums with it. Here every
id has one owner, the first token that has it, which adds the gradients of all of them one after the other:

    embedding_chain      grid (N / BLOCK)
      for block of SPAN other tokens            all pairs of tokens are compared
        first, following = is there an earlier token of this id; the next one
    embedding_backward   grid (N, D / BLOCK)
      if token is the first of its id:
        while token < N:                        a linked list in ascending order
          sum += dout[token];  token = following[token]
        dtable[id] += sum

Legend: N tokens, V rows of the table, D columns.

Bytes: forward reads and writes a row per token; backward reads a row of gradients per token, and reads and writes an
f32 row of the table per different id.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def embedding_forward(table, ids, out, rows, width, BLOCK: tl.constexpr):
    """Copy a block of columns of a token's row of the table. Grid: (N, D / BLOCK).

    An id outside the table gives NaN, so that it shows in the loss instead of reading other memory.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    inside = column < width
    value = tl.load(table + row * width + column, mask=inside & (row < rows), other=float("nan"))
    tl.store(out + token * width + column, value, mask=inside)


@triton.jit
def embedding_chain(ids, first, following, tokens, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Link the tokens of each id, without sorting: each token is compared with all others. Grid: (N / BLOCK).

    `first` becomes 1 where no earlier token has this one's id, else 0; `following` the next token that has it, or N.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    own_id = tl.load(ids + token, mask=inside, other=0)[:, None]
    # Kept per pair [BLOCK, SPAN] and reduced once at the end: no reduction over threads within the loop.
    has_earlier = tl.zeros([BLOCK, SPAN], tl.int32)
    next_token = tl.zeros([BLOCK, SPAN], tl.int32) + tokens
    for start in range(0, tokens, SPAN):
        other = start + tl.arange(0, SPAN)
        exists = other < tokens
        same = (own_id == tl.load(ids + other, mask=exists, other=0)[None, :]) & exists[None, :]
        has_earlier |= (same & (other[None, :] < token[:, None])).to(tl.int32)
        is_later = same & (other[None, :] > token[:, None])
        next_token = tl.where(is_later, tl.minimum(next_token, other[None, :]), next_token)
    tl.store(first + token, 1 - tl.max(has_earlier, 1), mask=inside)
    tl.store(following + token, tl.min(next_token, 1), mask=inside)


@triton.jit
def embedding_backward(ids, dout, first, following, dtable, tokens, rows, width, BLOCK: tl.constexpr):
    """Add the gradients of all tokens of an id to the table's row, by its first token. Grid: (N, D / BLOCK).

    Every element of the table has one program at most that reads and writes it. Programs of other tokens end at once,
    as do those of ids outside the table.
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


# 32 x 128 pairs over 128 threads are 32 per thread, each with two integers in registers. Backward takes 512 columns
# instead of 1,024: a frequent id is a long chain that only its own programs follow, and more of them share it.
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
