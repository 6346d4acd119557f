"""Causal attention of packed QKV rows, forward: tiles, a running softmax (Dao, "FlashAttention-2", arXiv:2307.08691).

Legend: N tokens = B sequences of T positions, H query heads, K key/value heads (query head h uses h // (H / K)), E head
size, P = (H + 2K) * E, C capacity of a cache, S new tokens; M query rows and L keys of a tile.

A tile of queries meets the tiles of keys at or before it: those on the diagonal with a mask, the others without.
Programs of long rows come first, across all heads, so that short ones fill the end. Tiles begin at 64-bit addresses;
offsets within one are 32-bit. Head sizes are multiples of 8 and come as `head_size_8 = E / 8`, which tells the
compiler that rows begin at multiples of 16 bytes. A variant with EXACT knows that E = BLOCK_E; the others mask the
columns from E on.

With DOCUMENTS a query sees its own document only: `documents_N` holds for every token the position within its sequence
at which its document begins; it never falls within a sequence.
"""

import triton
import triton.language as tl
from attention_variants import Tile, Tiles, variants

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _places(matrix, stride, first, end, E, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr):
    """Addresses of [ROWS, BLOCK_E] from row `first` on, and which lie before row `end` and column E."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_E)
    inside = (first + row < end)[:, None]
    if not EXACT:
        inside = inside & (column < E)[None, :]
    return matrix + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :]), inside


@triton.jit
def load_rows(matrix, stride, first, end, E, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr):
    """[ROWS, BLOCK_E] of a matrix from row `first` on; zeros from row `end` and from column E on."""
    at, inside = _places(matrix, stride, first, end, E, ROWS, BLOCK_E, EXACT)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(value, matrix, stride, first, end, E, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr):
    """The reverse of `load_rows`; what lies outside stays as it is."""
    at, inside = _places(matrix, stride, first, end, E, ROWS, BLOCK_E, EXACT)
    tl.store(at, value.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(
    matrix, stride, first, end, E, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr
):
    """As `load_rows`; without MASKED, rows that are known to lie before `end`."""
    at, inside = _places(matrix, stride, first, end, E, ROWS, BLOCK_E, EXACT)
    if MASKED:
        return tl.load(at, mask=inside, other=0.0)
    if EXACT:
        return tl.load(at)
    return tl.load(at, mask=(tl.arange(0, BLOCK_E) < E)[None, :], other=0.0)


@triton.jit
def head_size(head_size_8, BLOCK_E: tl.constexpr, EXACT: tl.constexpr):
    """E, with what the compiler may know of it."""
    if EXACT:
        return BLOCK_E
    return head_size_8 * 8


@triton.jit
def document_limits(documents_T, first, whole, T, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr):
    """Of queries from `first` on: where their keys begin, and from where on up to `whole` all of them see these."""
    last_row = tl.minimum(first + BLOCK_M, T) - 1
    begin = tl.load(documents_T + first) // BLOCK_L * BLOCK_L
    common = tl.cdiv(tl.load(documents_T + last_row), BLOCK_L) * BLOCK_L
    return begin, tl.minimum(common, whole)


@triton.jit
def _meet(
    out_ME, peak_M, sum_M, q_ME, keys, values, stride, first, end, position_M, document_M, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The running softmax after a tile of keys. `scale` and `peak_M`, the largest score, are in powers of two."""
    k_LE = load_keys(keys, stride, first, end, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    score_ML = tl.dot(q_ME, tl.trans(k_LE), input_precision="ieee")
    if MASKED:
        key_L = first + tl.arange(0, BLOCK_L)
        seen = key_L[None, :] <= position_M[:, None]
        if DOCUMENTS:
            seen = seen & (key_L[None, :] >= document_M[:, None])
        score_ML = tl.where(seen, score_ML, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(score_ML, 1) * scale)
    # Before its document a row sees nothing: its peak stays at -inf, and differences from 0 leave its sums at 0.
    origin_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M) if MASKED and DOCUMENTS else new_peak_M
    p_ML = tl.exp2(score_ML * scale - origin_M[:, None])
    factor_M = tl.exp2(peak_M - origin_M)
    sum_M = sum_M * factor_M + tl.sum(p_ML, 1)
    v_LE = load_keys(values, stride, first, end, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    out_ME = tl.dot(p_ML.to(v_LE.dtype), v_LE, out_ME * factor_M[:, None], input_precision="ieee")
    return out_ME, new_peak_M, sum_M


@triton.jit
def masked_tile(step, common, whole):
    """Where a masked tile of keys begins: before `common` while `step` is negative, then from `whole` on."""
    return step + tl.where(step < 0, common, whole)


@triton.jit
def online_softmax(
    q_ME, keys, values, stride, begin, common, whole, end, position_M, document_M, E, scale,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Weighted sum of values, sum of weights and row_max of the keys from `begin` to `end`.

    All rows see the keys from `common` to `whole`. Both sums are times 2^-row_max, and row_max is in powers of two.
    Tiles with a mask first, in one loop: a third one would make ptxas wait for every single product on Hopper.
    """
    out_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    for step in tl.range(begin - common, end - whole, BLOCK_L):
        out_ME, row_max_M, row_sum_M = _meet(
            out_ME, row_max_M, row_sum_M, q_ME, keys, values, stride, masked_tile(step, common, whole), end, position_M,
            document_M, E, scale, True, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    for first in tl.range(common, whole, BLOCK_L):
        out_ME, row_max_M, row_sum_M = _meet(
            out_ME, row_max_M, row_sum_M, q_ME, keys, values, stride, first, end, position_M, document_M, E, scale,
            False, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    return out_ME, row_max_M, row_sum_M


@triton.jit
def query_tile(
    qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr
):
    """What a program of the grid (B * H, tiles of T) works on.

    The tile's first position, its head and its sequence's first token; E and P; where that sequence's queries and keys
    of this head begin.
    """
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    E = head_size(head_size_8, BLOCK_E, EXACT)
    P = (heads + 2 * kv_heads) * E
    token = sequence.to(tl.int64) * T
    queries = qkv_NP + token * P + head * E
    keys = qkv_NP + token * P + (heads + head // (heads // kv_heads)) * E
    return first, head, token, E, P, queries, keys


@triton.jit
def attention_forward(
    qkv_NP, documents_N, out_NHE, lse_BHT, T, heads, kv_heads, head_size_8, scale, DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of positions of one head. Grid: (B * H, tiles of T); `scale` is 1 / sqrt(E)."""
    first, head, token, E, P, queries, keys = query_tile(
        qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M, BLOCK_E, EXACT
    )
    q_ME = load_rows(queries, P, first, T, E, BLOCK_M, BLOCK_E, EXACT)
    position_M = first + tl.arange(0, BLOCK_M)
    document_M = position_M
    whole = first // BLOCK_L * BLOCK_L
    end = tl.minimum(first + BLOCK_M, T)
    begin = 0
    common = 0
    if DOCUMENTS:
        document_M = tl.load(documents_N + token + position_M, mask=position_M < T, other=0)
        begin, common = document_limits(documents_N + token, first, whole, T, BLOCK_M, BLOCK_L)
    out_ME, row_max_M, row_sum_M = online_softmax(
        q_ME, keys, keys + kv_heads * E, P, begin, common, whole, end, position_M, document_M, E, scale * LOG2_E,
        DOCUMENTS, BLOCK_M, BLOCK_L, BLOCK_E, EXACT,
    )  # fmt: skip
    out_ME = out_ME / row_sum_M[:, None]
    lse_M = (row_max_M + tl.log2(row_sum_M)) * LN_2
    store_rows(out_ME, out_NHE + token * heads * E + head * E, heads * E, first, T, E, BLOCK_M, BLOCK_E, EXACT)
    tl.store(lse_BHT + tl.program_id(0).to(tl.int64) * T + position_M, lse_M, mask=position_M < T)


SIZES = dict.fromkeys(("heads", "kv_heads", "head_size_8"), "i32")

# A processor of a 5090 does 512 operations on bf16 a clock: everything waits for the tensor cores, which two or three
# small blocks keep busy while others take exponentials. One of an A100 does 2,048: there 32 rows a warp halve what is
# read from shared memory, and 128 rows a block what is read from the cache. One of an H200 does 4,096, which takes no
# longer than the exponentials: two blocks of two warp groups each overlap the one with the other.
KERNELS = [
    *variants(
        "attention_forward",
        attention_forward,
        {"qkv_NP": "element", "documents_N": "*i32:16", "out_NHE": "element", "lse_BHT": "*fp32:16", "T": "i32"}
        | SIZES
        | {"scale": "fp32"},
        Tiles(
            anywhere={32: Tile(64, 64, 4, 3), 64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(128, 32, 4, 3), 128: Tile(64, 64, 4, 2)},
                "sm_80_small": {64: Tile(64, 64, 4, 2, 168), 128: Tile(64, 32, 4, 2)},
                "sm_90a": {64: Tile(128, 64, 8, 3, 128), 128: Tile(128, 128, 8, 2)},
            },
            candidates={"sm_90a": {64: [Tile(128, 128, 8, 2)]}},
        ),
    ),
]
