"""Root-mean-square norms of each query and key head of packed QKV rows (QK-norm, arXiv:2302.05442), as in Qwen3.

    normed = x * rstd * weight                rstd = 1 / sqrt(mean(x^2) + epsilon) of a head
    dx = rstd * (weight * dnormed - x * rstd^2 * mean(x * weight * dnormed))
    dweight += sum over rows and heads of dnormed * x * rstd

`weight` holds the elements of the query heads' norm, then those of the key heads'. Values are copied. Backward computes
rstd again, which costs less than to store and load it. Its sum is over rows, in two launches (`partial_sums.py`):

    for block of HEADS heads = part, part + parts, ...
      dnormed[heads] = dx
      dquery, dkey += dnormed * x * rstd of the query heads, of the key heads
    partials[part] = [sum of dquery over the block's heads, sum of dkey]

Legend: N rows of P = (H + 2 K) E, H query heads, K key/value heads, E head size.

Bytes per row: forward twice its elements, backward three times those of the (H + K) E normed ones.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def reciprocal_rms(x_HE, head_size, epsilon):
    """Return `1 / sqrt(mean(x^2) + epsilon)` of each head; elements past the head size are 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x_HE * x_HE, 1) / head_size + epsilon))


@triton.jit
def qk_norm_forward(
    projected,
    weight,
    qkv,
    count,
    query_heads,
    normed_heads,
    all_heads,
    head_size_8,
    epsilon,
    HEAD_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalize or copy HEADS of the `count` = N * (H + 2 K) heads. Grid: (count / HEADS).

    `normed_heads` is H + K, `all_heads` H + 2 K. The head size is HEAD_SIZE or, where MASKED, 8 * `head_size_8`, at
    most HEAD_SIZE.
    """
    size = HEAD_SIZE
    if MASKED:
        size = head_size_8 * 8
    element = tl.arange(0, HEAD_SIZE)[None, :]
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = (head < count)[:, None]
    if MASKED:
        inside = inside & (element < size)
    offset = head.to(tl.int64)[:, None] * size + element  # N * P elements may exceed 2^31
    x_HE = tl.load(projected + offset, mask=inside, other=0.0).to(tl.float32)
    rstd = reciprocal_rms(x_HE, size, epsilon)[:, None]
    of_row = head % all_heads
    is_key = (of_row >= query_heads).to(tl.int32)[:, None]
    is_normed = (of_row < normed_heads)[:, None]
    weight_HE = tl.load(weight + is_key * size + element, mask=inside & is_normed, other=0.0).to(tl.float32)
    normed_HE = tl.where(is_normed, x_HE * rstd * weight_HE, x_HE)
    tl.store(qkv + offset, normed_HE.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_backward(
    projected,
    weight,
    dqkv,
    partials,
    count,
    query_heads,
    normed_heads,
    all_heads,
    head_size_8,
    epsilon,
    HEAD_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn `dqkv` into the projections' gradient, and write the program's sums for the weights to `partials`.

    Grid: (parts). `count` is N * (H + K), the heads but those of values, which are numbered through all rows.
    """
    size = HEAD_SIZE
    if MASKED:
        size = head_size_8 * 8
    element = tl.arange(0, HEAD_SIZE)[None, :]
    dquery_HE = tl.zeros([HEADS, HEAD_SIZE], tl.float32)
    dkey_HE = tl.zeros([HEADS, HEAD_SIZE], tl.float32)
    for start in range(tl.program_id(0) * HEADS, count, tl.num_programs(0) * HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head < count)[:, None]
        if MASKED:
            inside = inside & (element < size)
        row, of_row = head // normed_heads, head % normed_heads
        offset = (row.to(tl.int64) * all_heads + of_row)[:, None] * size + element
        is_key = (of_row >= query_heads)[:, None]
        x_HE = tl.load(projected + offset, mask=inside, other=0.0).to(tl.float32)
        dnormed_HE = tl.load(dqkv + offset, mask=inside, other=0.0).to(tl.float32)
        weight_HE = tl.load(weight + is_key.to(tl.int32) * size + element, mask=inside, other=0.0).to(tl.float32)
        rstd = reciprocal_rms(x_HE, size, epsilon)[:, None]
        # The derivative through rstd: the part of the gradient along `x`, which the norm removes.
        along_x = rstd * rstd * (tl.sum(x_HE * (dnormed_HE * weight_HE), 1) / size)[:, None]
        dx_HE = rstd * (dnormed_HE * weight_HE - x_HE * along_x)
        tl.store(dqkv + offset, dx_HE.to(dqkv.dtype.element_ty), mask=inside)
        dweight_HE = dnormed_HE * x_HE * rstd
        dquery_HE += tl.where(is_key, 0.0, dweight_HE)
        dkey_HE += tl.where(is_key, dweight_HE, 0.0)
    column = tl.arange(0, HEAD_SIZE)
    sums = partials + tl.program_id(0).to(tl.int64) * 2 * size + column
    tl.store(sums, tl.sum(dquery_HE, 0), mask=column < size)
    tl.store(sums + size, tl.sum(dkey_HE, 0), mask=column < size)


# 2,048 elements per program for any head size: 16 per thread, two 16-byte accesses of bf16.
SIZES = {
    "count": "i32",
    "query_heads": "i32",
    "normed_heads": "i32",
    "all_heads": "i32",
    "head_size_8": "i32",
    "epsilon": "fp32",
}
KERNELS = [
    Kernel(
        f"qk_norm_{direction}.{dtype}.{variant}",
        function,
        arguments=dict.fromkeys(rows, pointer) | sums | SIZES,
        constants={"HEAD_SIZE": head_size, "MASKED": variant.endswith("m"), "HEADS": 2048 // head_size},
    )
    for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16"))
    for variant, head_size in (("e32", 32), ("e64", 64), ("e128", 128), ("e128m", 128))
    for direction, function, rows, sums in (
        ("forward", qk_norm_forward, ("projected", "weight", "qkv"), {}),
        ("backward", qk_norm_backward, ("projected", "weight", "dqkv"), {"partials": "*fp32:16"}),
    )
]
