"""The gradient of causal attention; every sum has one owner and one order. Legend and conventions as in `attention.py`.

With p = e^(score - lse), o = p v: dv = p^T do, dp = do v^T, delta = rowsum(do * o), ds = p * (dp - delta),
dq = ds k / sqrt(E), dk = ds^T q / sqrt(E). `attention_backward_queries` comes first: it sums delta for its own rows and
leaves it for `attention_backward_keys`, with the log-sum-exp in base 2 beside it: in `statistics_BH2T` each row of a
head has T numbers of delta, then T of log-sum-exp.
"""

import triton
import triton.language as tl
from attention import (
    LOG2_E,
    SIZES,
    document_limits,
    head_size,
    load_keys,
    load_rows,
    masked_tile,
    query_tile,
    store_rows,
)
from attention_variants import Tile, Tiles, variants


@triton.jit
def _meet_keys(
    dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, stride, first, end, position_M, document_M, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds to dq what a tile of keys gives; `scale` and `lse_M` in powers of two."""
    k_LE = load_keys(keys, stride, first, end, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    v_LE = load_keys(values, stride, first, end, E, MASKED, BLOCK_L, BLOCK_E, EXACT)
    score_ML = tl.dot(q_ME, tl.trans(k_LE), input_precision="ieee")
    p_ML = tl.exp2(score_ML * scale - lse_M[:, None])
    if MASKED:
        key_L = first + tl.arange(0, BLOCK_L)
        seen = key_L[None, :] <= position_M[:, None]
        if DOCUMENTS:
            seen = seen & (key_L[None, :] >= document_M[:, None])
        p_ML = tl.where(seen, p_ML, 0.0)
    dp_ML = tl.dot(do_ME, tl.trans(v_LE), input_precision="ieee")
    ds_ML = p_ML * (dp_ML - delta_M[:, None])
    return tl.dot(ds_ML.to(k_LE.dtype), k_LE, dq_ME, input_precision="ieee")


@triton.jit
def attention_backward_queries(
    qkv_NP, documents_N, out_NHE, lse_BHT, dout_NHE, dqkv_NP, statistics_BH2T, T, heads, kv_heads, head_size_8, scale,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient and statistics of a tile of positions of one head. Grid: (B * H, tiles of T)."""
    first, head, token, E, P, queries, keys = query_tile(
        qkv_NP, T, heads, kv_heads, head_size_8, BLOCK_M, BLOCK_E, EXACT
    )
    row = tl.program_id(0).to(tl.int64) * T
    values = keys + kv_heads * E
    out = token * (heads * E) + head * E
    position_M = first + tl.arange(0, BLOCK_M)
    inside_M = position_M < T
    do_ME = load_rows(dout_NHE + out, heads * E, first, T, E, BLOCK_M, BLOCK_E, EXACT)
    out_ME = load_rows(out_NHE + out, heads * E, first, T, E, BLOCK_M, BLOCK_E, EXACT)
    delta_M = tl.sum(out_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    # Rows past the end have no weight: 2^(0 - infinity).
    lse_M = tl.load(lse_BHT + row + position_M, mask=inside_M, other=float("inf")) * LOG2_E
    tl.store(statistics_BH2T + 2 * row + position_M, delta_M, mask=inside_M)
    tl.store(statistics_BH2T + 2 * row + T + position_M, lse_M, mask=inside_M)
    q_ME = load_rows(queries, P, first, T, E, BLOCK_M, BLOCK_E, EXACT)
    dq_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    whole = first // BLOCK_L * BLOCK_L
    end = tl.minimum(first + BLOCK_M, T)
    scale_2 = scale * LOG2_E
    document_M = position_M
    begin = 0
    common = 0
    if DOCUMENTS:
        document_M = tl.load(documents_N + token + position_M, mask=inside_M, other=0)
        begin, common = document_limits(documents_N + token, first, whole, T, BLOCK_M, BLOCK_L)
    for step in tl.range(begin - common, end - whole, BLOCK_L):
        dq_ME = _meet_keys(
            dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, P, masked_tile(step, common, whole), end, position_M,
            document_M, E, scale_2, True, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    for key in tl.range(common, whole, BLOCK_L):
        dq_ME = _meet_keys(
            dq_ME, q_ME, do_ME, lse_M, delta_M, keys, values, P, key, end, position_M, document_M, E, scale_2,
            False, DOCUMENTS, BLOCK_L, BLOCK_E, EXACT,
        )  # fmt: skip
    store_rows(dq_ME * scale, dqkv_NP + token * P + head * E, P, first, T, E, BLOCK_M, BLOCK_E, EXACT)


@triton.jit
def _accumulate_queries(
    dk_LE, dv_LE, k_LE, v_LE, queries, stride, dout, out_stride, statistics, documents, first, key_L, T, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv what a tile of queries of one head gives, all transposed: rows are keys.

    Without MASKED every query of the tile lies before T and sees every key.
    """
    q_ME = load_keys(queries, stride, first, T, E, MASKED, BLOCK_M, BLOCK_E, EXACT)
    do_ME = load_keys(dout, out_stride, first, T, E, MASKED, BLOCK_M, BLOCK_E, EXACT)
    position_M = first + tl.arange(0, BLOCK_M)
    if MASKED:
        inside_M = position_M < T
        delta_M = tl.load(statistics + position_M, mask=inside_M, other=0.0)
        lse_M = tl.load(statistics + T + position_M, mask=inside_M, other=float("inf"))
    else:
        delta_M = tl.load(statistics + position_M)
        lse_M = tl.load(statistics + T + position_M)
    score_LM = tl.dot(k_LE, tl.trans(q_ME), input_precision="ieee")
    p_LM = tl.exp2(score_LM * scale - lse_M[None, :])
    if MASKED:
        seen = key_L[:, None] <= position_M[None, :]
        if DOCUMENTS:
            seen = seen & (key_L[:, None] >= tl.load(documents + position_M, mask=inside_M, other=0)[None, :])
        p_LM = tl.where(seen, p_LM, 0.0)
    dv_LE = tl.dot(p_LM.to(do_ME.dtype), do_ME, dv_LE, input_precision="ieee")
    dp_LM = tl.dot(v_LE, tl.trans(do_ME), input_precision="ieee")
    ds_LM = p_LM * (dp_LM - delta_M[None, :])
    dk_LE = tl.dot(ds_LM.to(q_ME.dtype), q_ME, dk_LE, input_precision="ieee")
    return dk_LE, dv_LE


@triton.jit
def _accumulate_heads(
    dk_LE, dv_LE, k_LE, v_LE, qkv_P, dout_HE, statistics_H2T, documents_T, tiles, begin, skip_from, skip_to, first_head,
    group, key_L, T, heads, kv_heads, E, scale,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds `tiles` tiles of queries of each head of the group, from position `begin` on.

    Those from number `skip_from` to `skip_to` are left out. One loop over heads and tiles: its loads stay in flight
    from one head to the next.
    """
    # The loop's first loads may be issued before its test, and a division by 0 is undefined there.
    tiles_per_head = tl.maximum(tiles, 1)
    for step in tl.range(0, group * tiles):
        head = first_head + step // tiles_per_head
        tile = step % tiles_per_head
        tile = tl.where(tile < skip_from, tile, tile + skip_to - skip_from)
        dk_LE, dv_LE = _accumulate_queries(
            dk_LE, dv_LE, k_LE, v_LE, qkv_P + head * E, (heads + 2 * kv_heads) * E, dout_HE + head * E, heads * E,
            statistics_H2T + head.to(tl.int64) * (2 * T), documents_T, begin + tile * BLOCK_M, key_L, T, E, scale,
            MASKED, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
        )  # fmt: skip
    return dk_LE, dv_LE


@triton.jit
def _document_ends(documents_T, first_key, last_key, T, BLOCK: tl.constexpr):
    """For either key the position after the last whose document begins at or before it.

    As documents never fall, that is the number of such positions.
    """
    of_first, of_last = 0, 0
    for first in range(0, T, BLOCK):
        position = first + tl.arange(0, BLOCK)
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
    """Gradients of a key/value head's tile, from all query heads that it serves. Grid: (B * K, tiles of T).

    Of T / BLOCK_M tiles of queries per head BLOCK_L / BLOCK_M lie on the diagonal: only these are masked, and the last
    one where T fills no whole tile, and with documents those that hold queries of a later one.
    """
    sequence = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    group = heads // kv_heads
    key = tl.program_id(1) * BLOCK_L
    E = head_size(head_size_8, BLOCK_E, EXACT)
    P = (heads + 2 * kv_heads) * E
    token = sequence.to(tl.int64) * T
    keys = token * P + (heads + kv_head) * E
    values = keys + kv_heads * E
    k_LE = load_rows(qkv_NP + keys, P, key, T, E, BLOCK_L, BLOCK_E, EXACT)
    v_LE = load_rows(qkv_NP + values, P, key, T, E, BLOCK_L, BLOCK_E, EXACT)
    key_L = key + tl.arange(0, BLOCK_L)
    dk_LE = tl.zeros([BLOCK_L, BLOCK_E], tl.float32)
    dv_LE = tl.zeros([BLOCK_L, BLOCK_E], tl.float32)
    end = T
    common = T
    if DOCUMENTS:
        last_key = tl.minimum(key + BLOCK_L, T) - 1
        common, end = _document_ends(documents_N + token, key, last_key, T, 1024)
    # Tiles from the one that holds the first key on: all queries of [diagonal, whole) see all keys.
    begin = key // BLOCK_M * BLOCK_M
    tiles = tl.cdiv(end - begin, BLOCK_M)
    diagonal = tl.minimum(tl.cdiv(key + BLOCK_L - 1 - begin, BLOCK_M), tiles)
    whole = tl.maximum((common - begin) // BLOCK_M, diagonal)
    statistics = statistics_BH2T + token * (2 * heads)
    dk_LE, dv_LE = _accumulate_heads(
        dk_LE, dv_LE, k_LE, v_LE, qkv_NP + token * P, dout_NHE + token * (heads * E), statistics, documents_N + token,
        tiles - (whole - diagonal), begin, diagonal, whole, kv_head * group, group, key_L, T, heads, kv_heads, E,
        scale * LOG2_E, True, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
    )  # fmt: skip
    dk_LE, dv_LE = _accumulate_heads(
        dk_LE, dv_LE, k_LE, v_LE, qkv_NP + token * P, dout_NHE + token * (heads * E), statistics, documents_N + token,
        whole - diagonal, begin, 0, diagonal, kv_head * group, group, key_L, T, heads, kv_heads, E,
        scale * LOG2_E, False, DOCUMENTS, BLOCK_M, BLOCK_E, EXACT,
    )  # fmt: skip
    store_rows(dk_LE * scale, dqkv_NP + keys, P, key, T, E, BLOCK_L, BLOCK_E, EXACT)
    store_rows(dv_LE, dqkv_NP + values, P, key, T, E, BLOCK_L, BLOCK_E, EXACT)


GRADIENTS = {"dout_NHE": "element", "dqkv_NP": "element", "statistics_BH2T": "*fp32:16", "T": "i32"}

# Both hold the rows of two operands and one or two sums in registers, so that two blocks of 4 warps and 64 rows fit on
# a processor with 99 KiB of shared memory. Where 128 columns leave room for one block only, it has 8 warps.
KERNELS = [
    *variants(
        "attention_backward_queries",
        attention_backward_queries,
        {"qkv_NP": "element", "documents_N": "*i32:16", "out_NHE": "element", "lse_BHT": "*fp32:16"}
        | GRADIENTS
        | SIZES
        | {"scale": "fp32"},
        Tiles(
            anywhere={32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)},
                "sm_80_small": {128: Tile(64, 64, 8, 2)},
                "sm_90a": {64: Tile(128, 64, 8, 2, 128), 128: Tile(128, 64, 8, 2)},
            },
        ),
    ),
    *variants(
        "attention_backward_keys",
        attention_backward_keys,
        {"qkv_NP": "element", "documents_N": "*i32:16"} | GRADIENTS | SIZES | {"scale": "fp32"},
        Tiles(
            anywhere={32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2)},
            f32={32: Tile(32, 32, 4, 2), 64: Tile(32, 16, 4, 2), 128: Tile(16, 16, 4, 2)},
            by_family={
                "sm_80": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2)},
                "sm_90a": {64: Tile(64, 64, 4, 3), 128: Tile(32, 128, 8, 2)},
            },
            candidates={"sm_90a": {64: [Tile(64, 128, 8, 2)]}},
        ),
    ),
]
