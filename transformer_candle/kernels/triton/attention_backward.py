"""Causal attention, backward (FlashAttention-2; Dao, arXiv:2307.08691, Algorithm 2). Legend as in `attention.py`.

    P  = exp(S - lse), recomputed per tile          delta = rowsum(dO * O), which equals rowsum(dP * P)
    dV = P^T dO          dP = dO V^T                dS = P * (dP - delta)
    dQ = dS K / sqrt(E)                             dK = dS^T Q / sqrt(E)

dQ sums over keys, dK and dV over queries. The paper's single pass adds to dQ with atomics, in an order that changes
from run to run. Here each sum has one owner and a fixed order, so the gradients are deterministic, for 7 matmuls per
tile instead of 5: S and dP are computed in both kernels.

    attention_backward_queries            grid (B * H, T / BLOCK_M), longest rows first
      for KV tile of BLOCK_L keys           masked tiles, then full tiles
        p  = exp(q k^T - lse)               [M, L] f32
        dp = do v^T                         [M, L]
        dq = dq + p * (dp - delta) k        [M, E] f32, stays in registers

    attention_backward_keys               grid (B * K, T / BLOCK_L)
      for query head of the group           one loop with the next: H / K heads share a key/value head, whose dk and dv
        for query tile of BLOCK_M rows      are sums over all of them. Masked tiles, then full tiles
          p^T = exp(k q^T - lse)            [L, M] f32
          dv  = dv + p^T do                 [L, E] f32, stays in registers
          dp^T = v do^T                     [L, M]
          dk  = dk + p^T * (dp^T - delta) q [L, E] f32, stays in registers

`attention_backward_queries` runs first. It computes delta for its rows and stores it for `attention_backward_keys` with
the log-sum-exp in base 2, which saves each later tile a multiplication: `statistics_BH2T` holds for each head T values
of delta, then T of log-sum-exp.
"""

import triton
import triton.language as tl
from attention import (
    LOG2_E,
    SIZES,
    document_bounds,
    head_size,
    load_tile,
    masked_tile_start,
    query_tile,
    store_tile,
)
from attention_variants import Tile, Tiles, variants


@triton.jit
def _accumulate_dq(
    dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, stride, first_key, end_key, position_M, document_M, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a KV tile's contribution to dq. `scale` contains log2(e); `lse_M` has base 2."""
    k_LE = load_tile(keys, stride, first_key, end_key, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    v_LE = load_tile(values, stride, first_key, end_key, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    score_ML = tl.dot(q_ME, tl.trans(k_LE), input_precision="ieee")
    # exp(score - lse) is the probability itself: backward needs no row_max, row_sum or rescale.
    p_ML = tl.exp2(score_ML * scale - lse_M[:, None])
    if MASKED:
        key_L = first_key + tl.arange(0, BLOCK_L)
        visible_ML = key_L[None, :] <= position_M[:, None]
        if DOCUMENTS:
            visible_ML = visible_ML & (key_L[None, :] >= document_M[:, None])
        # After the exponential, which may overflow to infinity for keys that the log-sum-exp does not cover.
        p_ML = tl.where(visible_ML, p_ML, 0.0)
    dp_ML = tl.dot(do_ME, tl.trans(v_LE), input_precision="ieee")
    ds_ML = p_ML * (dp_ML - delta_M[:, None])
    return tl.dot(ds_ML.to(k_LE.dtype), k_LE, dq_ME, input_precision="ieee")


@triton.jit
def attention_backward_queries(
    qkv_NP, documents_N, out_NHE, lse_BHT, dout_NHE, dqkv_NP, statistics_BH2T, T, heads, kv_heads, head_size_8, scale,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute dq, delta and log-sum-exp in base 2 of a query tile of one head. Grid: (B * H, T / BLOCK_M)."""
    first_query, head, first_token, E, P, queries, keys = query_tile(
        qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M, BLOCK_E, EXACT
    )
    row = tl.program_id(0).to(tl.int64) * T
    values = keys + kv_heads * E
    out = first_token * (heads * E) + head * E
    position_M = first_query + tl.arange(0, BLOCK_M)
    inside_M = position_M < T
    do_ME = load_tile(dout_NHE + out, heads * E, first_query, T, E, True, BLOCK_M, BLOCK_E, EXACT)
    out_ME = load_tile(out_NHE + out, heads * E, first_query, T, E, True, BLOCK_M, BLOCK_E, EXACT)
    delta_M = tl.sum(out_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    # Rows past the end get the weight 2^(0 - inf) = 0, and so add nothing anywhere.
    lse_M = tl.load(lse_BHT + row + position_M, mask=inside_M, other=float("inf")) * LOG2_E
    tl.store(statistics_BH2T + 2 * row + position_M, delta_M, mask=inside_M)
    tl.store(statistics_BH2T + 2 * row + T + position_M, lse_M, mask=inside_M)
    q_ME = load_tile(queries, P, first_query, T, E, True, BLOCK_M, BLOCK_E, EXACT)
    dq_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    full_end = first_query // BLOCK_L * BLOCK_L
    end = tl.minimum(first_query + BLOCK_M, T)
    scale_2 = scale * LOG2_E
    document_M = position_M  # a placeholder of the right type, which no code without DOCUMENTS reads
    begin = 0
    full_begin = 0
    if DOCUMENTS:
        document_M = tl.load(documents_N + first_token + position_M, mask=inside_M, other=0)
        begin, full_begin = document_bounds(documents_N + first_token, first_query, full_end, T, BLOCK_M, BLOCK_L)
    # Masked tiles, then full tiles: the loops of `online_softmax`.
    for step in tl.range(begin - full_begin, end - full_end, BLOCK_L):
        dq_ME = _accumulate_dq(
            dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, P, masked_tile_start(step, full_begin, full_end), end,
            position_M, document_M, E, scale_2, True, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    for first_key in tl.range(full_begin, full_end, BLOCK_L):
        dq_ME = _accumulate_dq(
            dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, P, first_key, end, position_M, document_M, E, scale_2,
            False, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    # The scale of dS, applied once to dq instead of to every score.
    store_tile(dq_ME * scale, dqkv_NP + first_token * P + head * E, P, first_query, T, E, BLOCK_M, BLOCK_E, EXACT)


@triton.jit
def _accumulate_dk_dv(
    dk_LE, dv_LE, k_LE, v_LE, queries, stride, dout, out_stride, statistics, documents, first_query, key_L, T, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one head's query tile to dk and dv.

    Scores are transposed, rows are keys: p^T and ds^T come out of their matmuls as the left operands of the next ones
    and need not be transposed through shared memory. Without MASKED every query of the tile lies before T and sees
    every key.
    """
    q_ME = load_tile(queries, stride, first_query, T, E, MASKED, BLOCK_M, BLOCK_E, EXACT)
    do_ME = load_tile(dout, out_stride, first_query, T, E, MASKED, BLOCK_M, BLOCK_E, EXACT)
    position_M = first_query + tl.arange(0, BLOCK_M)
    if MASKED:
        # Queries past the end get the weight 2^(0 - inf) = 0, and so add nothing to any key.
        inside_M = position_M < T
        delta_M = tl.load(statistics + position_M, mask=inside_M, other=0.0)
        lse_M = tl.load(statistics + T + position_M, mask=inside_M, other=float("inf"))
    else:
        delta_M = tl.load(statistics + position_M)
        lse_M = tl.load(statistics + T + position_M)
    score_LM = tl.dot(k_LE, tl.trans(q_ME), input_precision="ieee")
    p_LM = tl.exp2(score_LM * scale - lse_M[None, :])
    if MASKED:
        visible_LM = key_L[:, None] <= position_M[None, :]
        if DOCUMENTS:
            document_M = tl.load(documents + position_M, mask=inside_M, other=0)
            visible_LM = visible_LM & (key_L[:, None] >= document_M[None, :])
        p_LM = tl.where(visible_LM, p_LM, 0.0)
    dv_LE = tl.dot(p_LM.to(do_ME.dtype), do_ME, dv_LE, input_precision="ieee")
    dp_LM = tl.dot(v_LE, tl.trans(do_ME), input_precision="ieee")
    ds_LM = p_LM * (dp_LM - delta_M[None, :])
    dk_LE = tl.dot(ds_LM.to(q_ME.dtype), q_ME, dk_LE, input_precision="ieee")
    return dk_LE, dv_LE


@triton.jit
def _accumulate_query_tiles(
    dk_LE, dv_LE, k_LE, v_LE, qkv_P, dout_HE, statistics_H2T, documents_T, tiles, begin, skip_from, skip_to, first_head,
    group, key_L, T, heads, kv_heads, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add `tiles` query tiles of each head of the group, from position `begin` on, without `skip_from` to `skip_to`.

    One loop over heads and tiles, so that the loads of the next head are in flight while a head's last tile is
    computed; two nested loops would drain the pipeline between heads.
    """
    # Software pipelining issues the first loads before the loop's test, also where `tiles` is 0, and a division by 0 is
    # undefined there.
    tiles_per_head = tl.maximum(tiles, 1)
    for step in tl.range(0, group * tiles):
        head = first_head + step // tiles_per_head
        tile = step % tiles_per_head
        tile = tl.where(tile < skip_from, tile, tile + skip_to - skip_from)
        dk_LE, dv_LE = _accumulate_dk_dv(
            dk_LE, dv_LE, k_LE, v_LE, qkv_P + head * E, (heads + 2 * kv_heads) * E, dout_HE + head * E, heads * E,
            statistics_H2T + head.to(tl.int64) * (2 * T), documents_T, begin + tile * BLOCK_M, key_L, T, E, scale,
            MASKED, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
        )  # fmt: skip
    return dk_LE, dv_LE


@triton.jit
def _count_queries(documents_T, first_key, last_key, T, BLOCK: tl.constexpr):
    """Count the positions whose document begins at or before the key, for the first and the last key of a tile.

    Beginnings never decrease, so these are the positions before that number: where the queries of either key end.
    """
    of_first, of_last = 0, 0
    for first in range(0, T, BLOCK):
        position = first + tl.arange(0, BLOCK)
        # Positions past the end count for no key: T is larger than all.
        document = tl.load(documents_T + position, mask=position < T, other=T)
        of_first += tl.sum((document <= first_key).to(tl.int32), 0)
        of_last += tl.sum((document <= last_key).to(tl.int32), 0)
    return of_first, of_last


@triton.jit
def attention_backward_keys(
    qkv_NP, documents_N, dout_NHE, dqkv_NP, statistics_BH2T, T, heads, kv_heads, head_size_8, scale,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a KV tile, summed over the query heads that share it. Grid: (B * K, T / BLOCK_L).

    Masked are the BLOCK_L / BLOCK_M query tiles on the diagonal, the last one where T is no multiple of BLOCK_M, and
    with documents those that hold queries of a later document. Early tiles have the most queries and start first.
    """
    sequence = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    group = heads // kv_heads
    first_key = tl.program_id(1) * BLOCK_L
    E = head_size(head_size_8, BLOCK_E, EXACT)
    P = (heads + 2 * kv_heads) * E
    first_token = sequence.to(tl.int64) * T
    keys = first_token * P + (heads + kv_head) * E
    values = keys + kv_heads * E
    k_LE = load_tile(qkv_NP + keys, P, first_key, T, E, True, BLOCK_L, BLOCK_E, EXACT)
    v_LE = load_tile(qkv_NP + values, P, first_key, T, E, True, BLOCK_L, BLOCK_E, EXACT)
    key_L = first_key + tl.arange(0, BLOCK_L)
    dk_LE = tl.zeros([BLOCK_L, BLOCK_E], tl.float32)
    dv_LE = tl.zeros([BLOCK_L, BLOCK_E], tl.float32)
    # Only queries before `end` see any key of the tile, and only those before `common_end` all of it.
    end = T
    common_end = T
    if DOCUMENTS:
        last_key = tl.minimum(first_key + BLOCK_L, T) - 1
        common_end, end = _count_queries(documents_N + first_token, first_key, last_key, T, 1024)
    # Query tiles, counted from the one that holds the first key. Causality makes those before `full_begin` masked (a
    # query sees all keys from the last one's position on), `common_end` those from `full_end` on.
    begin = first_key // BLOCK_M * BLOCK_M
    tiles = tl.cdiv(end - begin, BLOCK_M)
    full_begin = tl.minimum(tl.cdiv(first_key + BLOCK_L - 1 - begin, BLOCK_M), tiles)
    full_end = tl.maximum((common_end - begin) // BLOCK_M, full_begin)
    statistics = statistics_BH2T + first_token * (2 * heads)
    # Masked tiles: all but [full_begin, full_end).
    dk_LE, dv_LE = _accumulate_query_tiles(
        dk_LE, dv_LE, k_LE, v_LE, qkv_NP + first_token * P, dout_NHE + first_token * (heads * E), statistics,
        documents_N + first_token, tiles - (full_end - full_begin), begin, full_begin, full_end, kv_head * group, group,
        key_L, T, heads, kv_heads, E, scale * LOG2_E, True, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
    )  # fmt: skip
    # Full tiles: only [full_begin, full_end).
    dk_LE, dv_LE = _accumulate_query_tiles(
        dk_LE, dv_LE, k_LE, v_LE, qkv_NP + first_token * P, dout_NHE + first_token * (heads * E), statistics,
        documents_N + first_token, full_end - full_begin, begin, 0, full_begin, kv_head * group, group,
        key_L, T, heads, kv_heads, E, scale * LOG2_E, False, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
    )  # fmt: skip
    store_tile(dk_LE * scale, dqkv_NP + keys, P, first_key, T, E, BLOCK_L, BLOCK_E, EXACT)
    store_tile(dv_LE, dqkv_NP + values, P, first_key, T, E, BLOCK_L, BLOCK_E, EXACT)


GRADIENTS = {"dout_NHE": "element", "dqkv_NP": "element", "statistics_BH2T": "*fp32:16", "T": "i32"}

# Both kernels keep two operands of their own rows (q and do, or k and v) and one or two f32 accumulators in registers
# or shared memory throughout. With 64 rows two blocks of 4 warps fit on a multiprocessor with 99 KiB of shared memory.
# Where 128 columns leave room for one block only, it has 8 warps, which spread its accumulators over twice the threads.
# Hopper's 8 warps are two warpgroups; 128 registers per thread let two such blocks share the 65,536 of a
# multiprocessor. f32 as in `attention.py`. Candidates are smaller tiles, of which three blocks share a multiprocessor
# for E = 64 and on Hopper two for E = 128, and larger tiles or more stages in one block.
KERNELS = [
    *variants(
        "attention_backward_queries",
        attention_backward_queries,
        {"qkv_NP": "element", "documents_N": "*i32:16", "out_NHE": "element", "lse_BHT": "*fp32:16"}
        | GRADIENTS
        | SIZES
        | {"scale": "fp32"},
        # Tile(query rows, keys, warps, stages, registers per thread), by BLOCK_E.
        Tiles(
            any_gpu={32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
                "sm_80_small": {128: Tile(64, 64, 8, 2)},
                "sm_90a": {64: Tile(128, 64, 8, 2, 128), 128: Tile(128, 64, 8, 2)},
            },
            candidates={
                "sm_80": {64: [Tile(64, 32, 4, 3)], 128: [Tile(64, 64, 8, 2)]},
                "sm_80_small": {128: [Tile(128, 32, 8, 2)]},
                "sm_90a": {64: [Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)], 128: [Tile(64, 64, 4, 2)]},
            },
        ),
    ),
    *variants(
        "attention_backward_keys",
        attention_backward_keys,
        {"qkv_NP": "element", "documents_N": "*i32:16"} | GRADIENTS | SIZES | {"scale": "fp32"},
        # Tile(query rows, keys, warps, stages, registers per thread), by BLOCK_E.
        Tiles(
            any_gpu={32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2)},
                "sm_90a": {64: Tile(64, 64, 4, 3), 128: Tile(32, 128, 8, 2)},
            },
            candidates={
                "sm_80": {128: [Tile(32, 64, 8, 3)]},
                "sm_90a": {64: [Tile(64, 128, 8, 2)], 128: [Tile(32, 64, 4, 2), Tile(32, 128, 8, 3)]},
            },
            candidates_with_documents={"sm_90a": {64: [Tile(64, 128, 8, 2)]}},
        ),
    ),
]
