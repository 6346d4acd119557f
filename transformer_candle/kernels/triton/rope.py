"""Rotary position embedding of the query and key heads of packed QKV rows, in place (Su et al., arXiv:2104.09864).

    x'[i]         = x[i] cos(t f_i)         - x[i + E / 2] sin(t f_i)        i < E / 2, t the position,
    x'[i + E / 2] = x[i + E / 2] cos(t f_i) + x[i] sin(t f_i)                f_i the frequency of pair i

Pairs are the two halves of a head ("rotate half", the layout of Hugging Face's Llama), not neighbours as in the paper:
the halves are two contiguous loads. The gradient is rotated by the negative angle, the transposed rotation.

Legend: N rows of P = (H + 2 K) E, H query heads, K key/value heads, E head size.

Bytes per row: twice its (H + K) E elements; the tables of cos and sin stay in the caches.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def rope_rotate(
    qkv,
    cos,
    sin,
    rows,
    length,
    first_position,
    turned_heads,
    all_heads,
    head_size_8,
    direction,
    HEAD_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS of the N * (H + K) heads. Grid: (N * (H + K) / HEADS).

    `turned_heads` is H + K, `all_heads` H + 2 K. `direction` is 1 in forward, -1 in backward. The head size is
    HEAD_SIZE or, where MASKED, 8 * `head_size_8`, at most HEAD_SIZE.
    """
    size = HEAD_SIZE
    if MASKED:
        size = head_size_8 * 8
    half = size // 2
    # Heads are numbered through all rows, those of values left out, so that programs are full for any number of heads.
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row = head // turned_heads
    element = tl.arange(0, HEAD_SIZE // 2)[None, :]
    inside = (row < rows)[:, None]
    if MASKED:
        inside = inside & (element < half)
    # Rows are whole sequences of `length` positions; in decoding one that begins at `first_position`.
    angle = (first_position + row % length)[:, None] * half + element
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * direction
    left = qkv + (row.to(tl.int64) * all_heads + head % turned_heads)[:, None] * size + element
    right = left + half
    # Both halves are read before either is written, each by the thread that writes it.
    a = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(right, mask=inside, other=0.0).to(tl.float32)
    tl.store(left, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(right, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)


# 2,048 elements per program for any head size: 16 per thread, 8 in each half, which is a 16-byte access of bf16.
KERNELS = [
    Kernel(
        f"rope_rotate.{dtype}.{variant}",
        rope_rotate,
        arguments={
            "qkv": pointer,
            "cos": "*fp32:16",
            "sin": "*fp32:16",
            "rows": "i32",
            "length": "i32",
            "first_position": "i32",
            "turned_heads": "i32",
            "all_heads": "i32",
            "head_size_8": "i32",
            "direction": "fp32",
        },
        constants={"HEAD_SIZE": head_size, "MASKED": variant.endswith("m"), "HEADS": 2048 // head_size},
    )
    for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16"))
    for variant, head_size in (("e32", 32), ("e64", 64), ("e128", 128), ("e128m", 128))
]
