"""Attention of S new tokens of one sequence whose first `past` tokens are cached, and the caches' new rows.

Legend and conventions as in `attention.py`. A row is a query head at a new position; rows of a key/value head's group
share its keys: G = H / K. The rows of a tile are the group's query heads at position 0, then at 1 ...

    attention_append          keys and values of the new tokens into the caches
    attention_decode          one program per key/value head and tile of rows: enough for a prompt
    attention_decode_split    for few rows: the keys are split among programs, each with a softmax of its own
    attention_decode_reduce   and those are put together (Dao et al., "Flash-Decoding for long-context inference")

One new token has K tiles, 8 for most models, on a GPU of 100 to 200 processors: only splits keep it busy.
"""

import triton
import triton.language as tl
from attention import LOG2_E, SIZES, head_size, online_softmax
from attention_variants import ELEMENTS, Tile, Tiles, variants
from declaration import Kernel

SPLITS = 64
"""Splits at most: what `attention_decode_reduce` reads of a row at a time."""


@triton.jit
def _new_rows(S, past, heads, kv_heads, BLOCK_M: tl.constexpr):
    """Of this program's tile of rows: head and new position of each, and whether it is one.

    Behind them the number of keys that its first row sees, and that its last one sees.
    """
    group = heads // kv_heads
    first = tl.program_id(1) * BLOCK_M
    row_M = first + tl.arange(0, BLOCK_M)
    new_M = row_M // group
    head_M = tl.program_id(0) * group + row_M % group
    last = tl.minimum(first + BLOCK_M, S * group) - 1
    return head_M, new_M, row_M < S * group, past + first // group + 1, past + last // group + 1


@triton.jit
def _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """[BLOCK_M, BLOCK_E] of the packed rows."""
    column = tl.arange(0, BLOCK_E)
    query_M = new_M.to(tl.int64) * ((heads + 2 * kv_heads) * E) + head_M * E
    return tl.load(
        qkv_SP + query_M[:, None] + column[None, :], mask=inside_M[:, None] & (column < E)[None, :], other=0.0
    )


@triton.jit
def attention_decode(
    qkv_SP, keys_CKE, values_CKE, out_SHE, S, past, heads, kv_heads, head_size_8, scale,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The output of a tile of rows. Grid: (K, tiles of S * G)."""
    E = head_size(head_size_8, BLOCK_E, EXACT)
    head_M, new_M, inside_M, seen_by_all, end = _new_rows(S, past, heads, kv_heads, BLOCK_M)
    q_ME = _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M, BLOCK_E)
    position_M = past + new_M
    offset = tl.program_id(0) * E
    out_ME, _, row_sum_M = online_softmax(
        q_ME, keys_CKE + offset, values_CKE + offset, kv_heads * E, 0, 0, seen_by_all // BLOCK_L * BLOCK_L, end,
        position_M, position_M, E, scale * LOG2_E, False, BLOCK_M, BLOCK_L, BLOCK_E, EXACT,
    )  # fmt: skip
    out_ME = out_ME / row_sum_M[:, None]
    column = tl.arange(0, BLOCK_E)
    out_M = new_M.to(tl.int64) * (heads * E) + head_M * E
    inside = inside_M[:, None] & (column < E)[None, :]
    tl.store(out_SHE + out_M[:, None] + column[None, :], out_ME.to(out_SHE.dtype.element_ty), mask=inside)


@triton.jit
def attention_decode_split(
    qkv_SP, keys_CKE, values_CKE, partial_ZSHE, row_max_ZSH, row_sum_ZSH, S, past, heads, kv_heads, head_size_8, scale,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of rows over one of Z splits of the keys, what `online_softmax` gives. Grid: (K, tiles of S * G, Z).

    Splits are equally many tiles of keys; the last ones may be empty, and a row may see none of a split's keys: its
    sums are 0 then, its row_max -infinity.
    """
    E = head_size(head_size_8, BLOCK_E, EXACT)
    head_M, new_M, inside_M, seen_by_all, end = _new_rows(S, past, heads, kv_heads, BLOCK_M)
    q_ME = _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M, BLOCK_E)
    position_M = past + new_M
    offset = tl.program_id(0) * E
    split = tl.program_id(2)
    keys_per_split = tl.cdiv(tl.cdiv(past + S, BLOCK_L), tl.num_programs(2)) * BLOCK_L
    begin = tl.minimum(split * keys_per_split, tl.cdiv(end, BLOCK_L) * BLOCK_L)
    end = tl.minimum(begin + keys_per_split, end)
    whole = tl.maximum(tl.minimum(seen_by_all // BLOCK_L * BLOCK_L, end), begin)
    # Rows that see no key are what the first of a document's tiles have: every row's document begins at 0.
    out_ME, row_max_M, row_sum_M = online_softmax(
        q_ME, keys_CKE + offset, values_CKE + offset, kv_heads * E, begin, begin, whole, end,
        position_M, position_M * 0, E, scale * LOG2_E, True, BLOCK_M, BLOCK_L, BLOCK_E, EXACT,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_E)
    row_M = (split * S + new_M).to(tl.int64) * heads + head_M
    inside = inside_M[:, None] & (column < E)[None, :]
    tl.store(partial_ZSHE + row_M[:, None] * E + column[None, :], out_ME, mask=inside)
    tl.store(row_max_ZSH + row_M, row_max_M, mask=inside_M)
    tl.store(row_sum_ZSH + row_M, row_sum_M, mask=inside_M)


@triton.jit
def attention_decode_reduce(
    partial_ZSHE, row_max_ZSH, row_sum_ZSH, out_SHE, splits, head_size_8, SPLITS: tl.constexpr, BLOCK_E: tl.constexpr
):
    """A row's output from its splits: each rescaled to the largest row_max. Grid: (S * H)."""
    rows = tl.num_programs(0)
    row = tl.program_id(0)
    E = head_size_8 * 8
    split_Z = tl.arange(0, SPLITS)
    inside_Z = split_Z < splits
    row_Z = split_Z.to(tl.int64) * rows + row
    row_max_Z = tl.load(row_max_ZSH + row_Z, mask=inside_Z, other=float("-inf"))
    # Every row sees a key, so that the largest is finite.
    rescale_Z = tl.exp2(row_max_Z - tl.max(row_max_Z, 0))
    row_sum = tl.sum(rescale_Z * tl.load(row_sum_ZSH + row_Z, mask=inside_Z, other=0.0), 0)
    column = tl.arange(0, BLOCK_E)
    inside = inside_Z[:, None] & (column < E)[None, :]
    partial_ZE = tl.load(partial_ZSHE + row_Z[:, None] * E + column[None, :], mask=inside, other=0.0)
    out_E = tl.sum(partial_ZE * rescale_Z[:, None], 0) / row_sum
    tl.store(out_SHE + row.to(tl.int64) * E + column, out_E.to(out_SHE.dtype.element_ty), mask=column < E)


@triton.jit
def attention_append(qkv_SP, keys_CKE, values_CKE, past, heads, kv_heads, head_size_8, BLOCK: tl.constexpr):
    """A new token's keys and values into the caches. Grid: (S)."""
    token = tl.program_id(0).to(tl.int64)
    E = head_size_8 * 8
    width = kv_heads * E
    keys = qkv_SP + token * (heads * E + 2 * width) + heads * E
    place = (past + token) * width
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(keys_CKE + place + at, tl.load(keys + at, mask=at < width), mask=at < width)
        tl.store(values_CKE + place + at, tl.load(keys + width + at, mask=at < width), mask=at < width)


READ = {"qkv_SP": "element", "keys_CKE": "element", "values_CKE": "element"}
PARTIAL = {"partial_ZSHE": "*fp32:16", "row_max_ZSH": "*fp32", "row_sum_ZSH": "*fp32"}
NUMBERS = {"S": "i32", "past": "i32"} | SIZES | {"scale": "fp32"}
TILES = Tiles(
    anywhere={32: Tile(16, 64, 4, 3), 64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 2)},
    f32={32: Tile(16, 32, 4, 2), 64: Tile(16, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
    by_family={},
)

KERNELS = [
    *variants("attention_decode", attention_decode, READ | {"out_SHE": "element"} | NUMBERS, TILES),
    *variants("attention_decode_split", attention_decode_split, READ | PARTIAL | NUMBERS, TILES),
    *(
        Kernel(
            f"attention_decode_reduce.{dtype}.e{columns}",
            attention_decode_reduce,
            PARTIAL | {"out_SHE": element, "splits": "i32", "head_size_8": "i32"},
            {"SPLITS": SPLITS, "BLOCK_E": columns},
        )
        for dtype, element in ELEMENTS.items()
        for columns in (32, 64, 128)
    ),
    *(
        Kernel(
            f"attention_append.{dtype}",
            attention_append,
            {"qkv_SP": f"{element}:16", "keys_CKE": f"{element}:16", "values_CKE": f"{element}:16", "past": "i32"}
            | SIZES,
            {"BLOCK": 1024},
        )
        for dtype, element in ELEMENTS.items()
    ),
]
