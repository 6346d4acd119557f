"""Attention of S new tokens of one sequence whose first `past` tokens are in a KV cache. Legend as in `attention.py`.

The G = H / K query heads that share a key/value head are rows of one tile, so that each key is read once for all of
them: row r of key/value head k is query head k G + r % G of new token r / G.

    attention_append          keys and values of the new tokens into the caches
    attention_decode          grid (K, S G / BLOCK_M): the online softmax of `attention.py`; enough blocks for a prompt
    attention_decode_split    grid (K, S G / BLOCK_M, Z), for few rows: split-K over the keys, as flash decoding does
    attention_decode_reduce   (Dao et al., "Flash-Decoding for long-context inference"), and its second pass

One new token has K row tiles, 8 for most models, on a GPU of 100 to 200 multiprocessors: only splits keep it busy.

    for key/value head, row tile, split z                 in parallel
      for KV tile of BLOCK_L keys in split z
        online softmax step                               out_z, row_max_z, row_sum_z: not divided, f32, to memory
    for row of S H                                        in parallel, a second launch
      rescale_z = 2^(row_max_z - max over z of row_max_z)
      out = sum over z of rescale_z out_z  /  sum over z of rescale_z row_sum_z
"""

import triton
import triton.language as tl
from attention import LOG2_E, SIZES, head_size, online_softmax
from attention_variants import ELEMENTS, Tile, Tiles, variants
from declaration import Kernel

SPLITS = 64
"""The largest number of splits: `attention_decode_reduce` holds a row's partial results in a tile [SPLITS, BLOCK_E]."""


@triton.jit
def _row_tile(S, past, heads, kv_heads, BLOCK_M: tl.constexpr):
    """Return per row of this program's tile query head, new token and whether the row exists.

    Then the number of keys that the first row of the tile sees, and that the last one sees.
    """
    group = heads // kv_heads
    first_row = tl.program_id(1) * BLOCK_M
    row_M = first_row + tl.arange(0, BLOCK_M)
    new_M = row_M // group
    head_M = tl.program_id(0) * group + row_M % group
    last_row = tl.minimum(first_row + BLOCK_M, S * group) - 1
    return head_M, new_M, row_M < S * group, past + first_row // group + 1, past + last_row // group + 1


@triton.jit
def _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Gather [BLOCK_M, BLOCK_E] from the packed rows; zeros for rows and columns that do not exist."""
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
    """Compute the output of a row tile over all keys. Grid: (K, S * G / BLOCK_M)."""
    E = head_size(head_size_8, BLOCK_E, EXACT)
    head_M, new_M, inside_M, first_row_keys, end = _row_tile(S, past, heads, kv_heads, BLOCK_M)
    q_ME = _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M, BLOCK_E)
    position_M = past + new_M
    offset = tl.program_id(0) * E
    # The first row sees the fewest keys: whole tiles of those are full, and no masked tile comes before them.
    out_ME, _, row_sum_M = online_softmax(
        q_ME, keys_CKE + offset, values_CKE + offset, kv_heads * E, 0, 0, first_row_keys // BLOCK_L * BLOCK_L, end,
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
    """Compute the online softmax of a row tile over one of Z splits of the keys. Grid: (K, S * G / BLOCK_M, Z).

    Stored are a row's partial output, not divided by row_sum, its row_max and its row_sum. Splits have equally many
    KV tiles. The last ones may be empty, and a row may see no key of a split: its sums are then 0 and its row_max
    -inf, which the reduction gives the weight 0.
    """
    E = head_size(head_size_8, BLOCK_E, EXACT)
    head_M, new_M, inside_M, first_row_keys, end = _row_tile(S, past, heads, kv_heads, BLOCK_M)
    q_ME = _load_queries(qkv_SP, head_M, new_M, inside_M, heads, kv_heads, E, BLOCK_M, BLOCK_E)
    position_M = past + new_M
    offset = tl.program_id(0) * E
    split = tl.program_id(2)
    # Boundaries depend on `past + S` only, not on the row tile, and are whole tiles.
    keys_per_split = tl.cdiv(tl.cdiv(past + S, BLOCK_L), tl.num_programs(2)) * BLOCK_L
    begin = tl.minimum(split * keys_per_split, tl.cdiv(end, BLOCK_L) * BLOCK_L)
    end = tl.minimum(begin + keys_per_split, end)
    full_end = tl.maximum(tl.minimum(first_row_keys // BLOCK_L * BLOCK_L, end), begin)
    # DOCUMENTS makes the softmax handle rows that see no key; that every row's document begins at 0 masks nothing.
    out_ME, row_max_M, row_sum_M = online_softmax(
        q_ME, keys_CKE + offset, values_CKE + offset, kv_heads * E, begin, begin, full_end, end,
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
    """Compute a row's output from its splits, each rescaled to the largest row_max. Grid: (S * H)."""
    rows = tl.num_programs(0)
    row = tl.program_id(0)
    E = head_size_8 * 8
    split_Z = tl.arange(0, SPLITS)
    inside_Z = split_Z < splits
    row_Z = split_Z.to(tl.int64) * rows + row
    row_max_Z = tl.load(row_max_ZSH + row_Z, mask=inside_Z, other=float("-inf"))
    # Every row sees a key in some split, so the largest row_max is finite, and 2^(-inf - finite) = 0 elsewhere.
    rescale_Z = tl.exp2(row_max_Z - tl.max(row_max_Z, 0))
    row_sum = tl.sum(rescale_Z * tl.load(row_sum_ZSH + row_Z, mask=inside_Z, other=0.0), 0)
    column = tl.arange(0, BLOCK_E)
    inside = inside_Z[:, None] & (column < E)[None, :]
    partial_ZE = tl.load(partial_ZSHE + row_Z[:, None] * E + column[None, :], mask=inside, other=0.0)
    out_E = tl.sum(partial_ZE * rescale_Z[:, None], 0) / row_sum
    tl.store(out_SHE + row.to(tl.int64) * E + column, out_E.to(out_SHE.dtype.element_ty), mask=column < E)


@triton.jit
def attention_append(qkv_SP, keys_CKE, values_CKE, past, heads, kv_heads, head_size_8, BLOCK: tl.constexpr):
    """Copy a new token's keys and values to the end of the caches. Grid: (S)."""
    token = tl.program_id(0).to(tl.int64)
    E = head_size_8 * 8
    width = kv_heads * E
    keys = qkv_SP + token * (heads * E + 2 * width) + heads * E
    cache_row = (past + token) * width
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        tl.store(keys_CKE + cache_row + column, tl.load(keys + column, mask=inside), mask=inside)
        tl.store(values_CKE + cache_row + column, tl.load(keys + width + column, mask=inside), mask=inside)


INPUTS = {"qkv_SP": "element", "keys_CKE": "element", "values_CKE": "element"}
PARTIAL = {"partial_ZSHE": "*fp32:16", "row_max_ZSH": "*fp32", "row_sum_ZSH": "*fp32"}
SCALARS = {"S": "i32", "past": "i32"} | SIZES | {"scale": "fp32"}
# 16 query rows, the fewest that tl.dot takes: one new token has only the G rows of a group. What takes the time is
# reading the cache, so bf16 keeps up to 3 tiles of 64 keys in flight.
TILES = Tiles(
    any_gpu={32: Tile(16, 64, 4, 3), 64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 2)},
    f32={32: Tile(16, 32, 4, 2), 64: Tile(16, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
    by_family={},
)

KERNELS = [
    *variants("attention_decode", attention_decode, INPUTS | {"out_SHE": "element"} | SCALARS, TILES),
    *variants("attention_decode_split", attention_decode_split, INPUTS | PARTIAL | SCALARS, TILES),
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
