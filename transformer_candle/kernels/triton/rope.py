"""Rotary position embedding of the query and key heads of packed QKV rows, in place ("rotate half").

Legend: N rows of P = (H + 2K) E, H query heads, K key/value heads, E head size.

Bytes moved a row: twice its (H + K) E elements; the tables stay in the caches.
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
    """Turns a group of heads a program, counted through all rows, both halves of each.

    The head size is HEAD_SIZE, or where MASKED 8 `head_size_8` and at most HEAD_SIZE. `direction` is 1 to turn forth,
    -1 to turn back.
    """
    size = HEAD_SIZE
    if MASKED:
        size = head_size_8 * 8
    half = size // 2
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row = head // turned_heads
    element = tl.arange(0, HEAD_SIZE // 2)[None, :]
    inside = (row < rows)[:, None]
    if MASKED:
        inside = inside & (element < half)
    angle = (first_position + row % length)[:, None] * half + element
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * direction
    left = qkv + (row.to(tl.int64) * all_heads + head % turned_heads)[:, None] * size + element
    right = left + half
    a = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(right, mask=inside, other=0.0).to(tl.float32)
    tl.store(left, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(right, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)


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
