"""Causal attention, forward (FlashAttention-2; Dao, arXiv:2307.08691, Algorithm 1), on packed rows [Q | K | V].

    S = Q K^T / sqrt(E), -inf above the diagonal       P = softmax(S)       O = P V       lse = log sum exp(S), per row

S is never stored. The online softmax keeps two numbers per query row, row_max and row_sum, and rescales what it has
accumulated whenever a KV tile raises row_max:

    for b * H + h in 0 .. B * H                      grid axis 0
      for query tile of BLOCK_M rows, last first     grid axis 1
        q = Q[tile]                                  [M, E], stays in registers or shared memory
        for KV tile of BLOCK_L keys                  k and v [L, E], prefetched into num_stages buffers of shared memory
          score   = q k^T                            [M, L] f32; masked tiles: -inf where the row does not see the key
          new_max = max(row_max, max(score))         [M]
          p       = exp(score - new_max)             [M, L], rounded to the operands' type for the next matmul
          rescale = exp(row_max - new_max)           [M]
          row_sum = row_sum * rescale + sum(p)       [M] f32
          out     = out * rescale + p v              [M, E] f32, stays in registers
        O[tile] = out / row_sum                      lse = row_max + log(row_sum), all that backward needs

Legend of the suffixes: N tokens = B sequences of T positions; H query heads, K key/value heads (grouped-query
attention: query head h reads key/value head h // (H / K)); E head size; P = (H + 2 K) E, the width of a packed row;
M rows of a query tile and L keys of a KV tile. In `attention_decode.py` also S new tokens and a cache of C positions.

BLOCK_M is the query rows and BLOCK_L the keys per tile. BLOCK_E is E rounded up to a power of two, which Triton's
blocks must be: a variant with EXACT knows that E = BLOCK_E, the others mask the columns from E on.

Masks cost comparisons for every score, so tiles come in two kinds. A full tile is seen by every row of the query tile
and needs no mask. A masked tile lies on the diagonal, at the end of the sequence or at a document's boundary.

With DOCUMENTS a query sees its own document only: `documents_N` holds, per token, the position within its sequence at
which its document begins. It never decreases within a sequence, so the first row of a tile has the earliest beginning
and the last row the latest.
"""

import triton
import triton.language as tl
from attention_variants import Tile, Tiles, variants

# The GPU's exponential instruction has base 2. exp(x) = exp2(x log2(e)), and log2(e) goes into the scale of the scores,
# which is multiplied anyway; the log-sum-exp returns to base e by a factor of ln(2).
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile_pointers(
    matrix, stride, first_row, end_row, E, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr
):
    """Return pointers to [ROWS, BLOCK_E] from `first_row` on, and their mask: before row `end_row` and column E."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_E)
    inside = (first_row + row < end_row)[:, None]
    if not EXACT:
        inside = inside & (column < E)[None, :]
    # The tile's start needs 64 bits (N * P may exceed 2^31 elements); within a tile 32 do, which halves the registers
    # that hold addresses.
    return matrix + tl.cast(first_row, tl.int64) * stride + (row[:, None] * stride + column[None, :]), inside


@triton.jit
def load_tile(
    matrix, stride, first_row, end_row, E,
    MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load [ROWS, BLOCK_E] of a matrix from `first_row` on; zeros from column E on and, where MASKED, row `end_row` on.

    Zeros because they add nothing to a matmul; 0 times what happens to lie in memory could be NaN.
    """
    pointers, inside = _tile_pointers(matrix, stride, first_row, end_row, E, ROWS, BLOCK_E, EXACT)
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    if EXACT:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tl.arange(0, BLOCK_E) < E)[None, :], other=0.0)


@triton.jit
def store_tile(
    value, matrix, stride, first_row, end_row, E, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr
):
    """Round to the matrix's type and store; rows from `end_row` on and columns from E on stay as they are."""
    pointers, inside = _tile_pointers(matrix, stride, first_row, end_row, E, ROWS, BLOCK_E, EXACT)
    tl.store(pointers, value.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def head_size(head_size_8, BLOCK_E: tl.constexpr, EXACT: tl.constexpr):
    """Return E as a multiple of 8: the compiler then knows that rows are aligned to 16 bytes, and loads 16 at once."""
    if EXACT:
        return BLOCK_E
    return head_size_8 * 8


@triton.jit
def document_bounds(documents_T, first_query, full_end, T, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr):
    """Return the first key that a row of the query tile sees, and the first that all rows see, in whole KV tiles.

    The former rounds down to a tile, the latter up: full tiles are those from there to `full_end`.
    """
    last_query = tl.minimum(first_query + BLOCK_M, T) - 1
    begin = tl.load(documents_T + first_query) // BLOCK_L * BLOCK_L
    full_begin = tl.cdiv(tl.load(documents_T + last_query), BLOCK_L) * BLOCK_L
    return begin, tl.minimum(full_begin, full_end)


@triton.jit
def _accumulate_kv_tile(
    out_ME, row_max_M, row_sum_M, q_ME, keys, values, stride, first_key, end_key, position_M, document_M, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Do a step of the online softmax: the loop body at the top. `scale` contains log2(e), so row_max_M has base 2."""
    k_LE = load_tile(keys, stride, first_key, end_key, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    # "ieee" concerns f32 only, which tl.dot would round to TF32's 10 bits of mantissa; bf16 uses tensor cores anyway.
    score_ML = tl.dot(q_ME, tl.trans(k_LE), input_precision="ieee")
    if MASKED:
        # Causality also excludes keys past the end: a row that is stored has a position before them.
        key_L = first_key + tl.arange(0, BLOCK_L)
        visible_ML = key_L[None, :] <= position_M[:, None]
        if DOCUMENTS:
            visible_ML = visible_ML & (key_L[None, :] >= document_M[:, None])
        score_ML = tl.where(visible_ML, score_ML, float("-inf"))
    # The scale is positive, so it commutes with the maximum: M multiplications instead of M * L. The exponent below is
    # then one fused multiply-add per score.
    new_max_M = tl.maximum(row_max_M, tl.max(score_ML, 1) * scale)
    # A row that has seen no key so far keeps a row_max of -inf. Subtracting that would give -inf - -inf = NaN; with 0
    # its weights and its rescale are 2^-inf = 0. Without documents the first tile has a key for every row.
    subtracted_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED and DOCUMENTS else new_max_M
    p_ML = tl.exp2(score_ML * scale - subtracted_M[:, None])
    rescale_M = tl.exp2(row_max_M - subtracted_M)
    row_sum_M = row_sum_M * rescale_M + tl.sum(p_ML, 1)
    v_LE = load_tile(values, stride, first_key, end_key, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    # The accumulator is an operand of the matmul: tensor cores add to it in f32.
    out_ME = tl.dot(p_ML.to(v_LE.dtype), v_LE, out_ME * rescale_M[:, None], input_precision="ieee")
    return out_ME, new_max_M, row_sum_M


@triton.jit
def masked_tile_start(step, full_begin, full_end):
    """Return the first key of a masked KV tile; `step` is negative before `full_begin`, else counts from `full_end`."""
    return step + tl.where(step < 0, full_begin, full_end)


@triton.jit
def online_softmax(
    q_ME, keys, values, stride, begin, full_begin, full_end, end, position_M, document_M, E, scale,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the sum of values weighted by 2^(score - row_max), row_max in base 2, row_sum, over keys `begin` to `end`.

    Tiles from `full_begin` to `full_end` are full. The masked tiles on both sides share one loop: with a third loop
    ptxas serializes the wgmma instructions of Hopper (`assemble.py` fails on that). They come first because without
    documents the first of them holds key `full_end`, which every row sees: row_max is finite from there on.
    """
    out_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    for step in tl.range(begin - full_begin, end - full_end, BLOCK_L):
        out_ME, row_max_M, row_sum_M = _accumulate_kv_tile(
            out_ME, row_max_M, row_sum_M, q_ME, keys, values, stride, masked_tile_start(step, full_begin, full_end),
            end, position_M, document_M, E, scale, True, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    for first_key in tl.range(full_begin, full_end, BLOCK_L):
        out_ME, row_max_M, row_sum_M = _accumulate_kv_tile(
            out_ME, row_max_M, row_sum_M, q_ME, keys, values, stride, first_key, end, position_M, document_M, E, scale,
            False, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    return out_ME, row_max_M, row_sum_M


@triton.jit
def query_tile(
    qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr
):
    """Return which query tile this program of the grid (B * H, T / BLOCK_M) computes.

    That is the tile's first position, its head, its sequence's first token, E, P, and pointers to that sequence's
    queries and keys of this head.
    """
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    # GPUs start blocks in the order of their number, axis 0 fastest. The last tiles of all heads have the most keys and
    # come first; the short ones then fill the multiprocessors at the end.
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    E = head_size(head_size_8, BLOCK_E, EXACT)
    P = (heads + 2 * kv_heads) * E
    first_token = sequence.to(tl.int64) * T
    queries = qkv_NP + first_token * P + head * E
    keys = qkv_NP + first_token * P + (heads + head // (heads // kv_heads)) * E
    return first_query, head, first_token, E, P, queries, keys


@triton.jit
def attention_forward(
    qkv_NP, documents_N, out_NHE, lse_BHT, T, heads, kv_heads, head_size_8, scale, DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one head's query tile. Grid: (B * H, T / BLOCK_M); `scale` is 1 / sqrt(E)."""
    first_query, head, first_token, E, P, queries, keys = query_tile(
        qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M, BLOCK_E, EXACT
    )
    q_ME = load_tile(queries, P, first_query, T, E, True, BLOCK_M, BLOCK_E, EXACT)
    position_M = first_query + tl.arange(0, BLOCK_M)
    document_M = position_M  # a placeholder of the right type, which no code without DOCUMENTS reads
    # Keys before the tile that holds the first query's own key are seen by every row.
    full_end = first_query // BLOCK_L * BLOCK_L
    end = tl.minimum(first_query + BLOCK_M, T)
    begin = 0
    full_begin = 0
    if DOCUMENTS:
        document_M = tl.load(documents_N + first_token + position_M, mask=position_M < T, other=0)
        begin, full_begin = document_bounds(documents_N + first_token, first_query, full_end, T, BLOCK_M, BLOCK_L)
    out_ME, row_max_M, row_sum_M = online_softmax(
        q_ME, keys, keys + kv_heads * E, P, begin, full_begin, full_end, end, position_M, document_M, E, scale * LOG2_E,
        DOCUMENTS, BLOCK_M, BLOCK_L, BLOCK_E, EXACT,
    )  # fmt: skip
    # Divided once at the end instead of in every step (FlashAttention-2, section 3.1). Every row sees its own key, so
    # row_sum is positive.
    out_ME = out_ME / row_sum_M[:, None]
    lse_M = (row_max_M + tl.log2(row_sum_M)) * LN_2
    out = out_NHE + first_token * heads * E + head * E
    store_tile(out_ME, out, heads * E, first_query, T, E, BLOCK_M, BLOCK_E, EXACT)
    tl.store(lse_BHT + tl.program_id(0).to(tl.int64) * T + position_M, lse_M, mask=position_M < T)


SIZES = dict.fromkeys(("heads", "kv_heads", "head_size_8"), "i32")

# Per score a program computes 4 E FLOPs on the tensor cores (two matmuls) and one exponential elsewhere. How the two
# compare decides the tiles; bf16 FLOPs per clock and multiprocessor:
#     RTX 5090    512   The tensor cores are the bottleneck: two or three small blocks keep them busy while others take
#                       exponentials. 168 registers per thread let three blocks of 128 threads share a multiprocessor's
#                       65,536.
#     A100      2,048   128 rows on 4 warps are 32 rows per warp instead of 16: each key read from shared memory serves
#                       twice as many, and each KV tile read from L2 as well.
#     H200      4,096   For E = 64 a score's matmuls take no longer than its exponential: two blocks of two warpgroups
#                       (8 warps), each at most 128 registers per thread, overlap the one with the other.
# f32 matmuls use no tensor cores and take their operands from registers, which bounds their tiles. 128 columns take
# fewer keys or fewer stages than 64: k and v of every stage lie in shared memory, which `assemble.py` checks against
# what a GPU has (99 KiB for sm_80_small). Candidates for 128 columns are query tiles of 128 rows on 8 warps, so that
# a KV tile serves twice the rows, and on Hopper two blocks of one warpgroup each: one multiplies while the other takes
# exponentials.
KERNELS = [
    *variants(
        "attention_forward",
        attention_forward,
        {"qkv_NP": "element", "documents_N": "*i32:16", "out_NHE": "element", "lse_BHT": "*fp32:16", "T": "i32"}
        | SIZES
        | {"scale": "fp32"},
        # Tile(query rows, keys, warps, stages, registers per thread), by BLOCK_E.
        Tiles(
            any_gpu={32: Tile(64, 64, 4, 3), 64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(128, 32, 4, 3), 128: Tile(64, 64, 4, 2)},
                "sm_80_small": {64: Tile(64, 64, 4, 2, 168), 128: Tile(64, 32, 4, 2)},
                "sm_90a": {64: Tile(128, 64, 8, 3, 128), 128: Tile(128, 128, 8, 2)},
            },
            candidates={
                "sm_80": {128: [Tile(128, 64, 8, 3)]},
                "sm_80_small": {128: [Tile(128, 32, 8, 2)]},
                "sm_90a": {64: [Tile(128, 128, 8, 2)], 128: [Tile(64, 64, 4, 2)]},
            },
            candidates_with_documents={"sm_90a": {64: [Tile(128, 128, 8, 2)]}},
        ),
    ),
]
