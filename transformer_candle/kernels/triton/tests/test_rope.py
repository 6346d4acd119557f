"""RoPE against Hugging Face's formula in f64."""

import pytest
import torch
from interpreter import launch
from oracle import DTYPES, assert_near, blocks, by_name, numbers
from rope import KERNELS

CASES = [("e32", 32), ("e64", 64), ("e128", 128), ("e128m", 40), ("e128m", 72), ("e128m", 96)]


def tables(positions, size):
    angles = torch.arange(positions).double()[:, None] * 10000.0 ** (-2 * torch.arange(size // 2).double() / size)
    return angles.cos().float(), angles.sin().float()


def rotate(qkv, heads, kv_heads, size, length, first, direction, variant, dtype):
    kernel = by_name(KERNELS, f"rope_rotate.{dtype}.{variant}")
    cos, sin = tables(first + length, size)
    rows, rotated_heads = len(qkv), heads + kv_heads
    grid = [blocks(rows * rotated_heads, kernel.constants["HEADS"])]
    sizes = (rows, length, first, rotated_heads, rotated_heads + kv_heads, size // 8)
    launch(kernel, grid, qkv, cos, sin, *sizes, direction)


def rotated(qkv, heads, kv_heads, size, length, first, direction):
    """Return `x cos + rotate_half(x) sin` of the query and key heads."""
    cos, sin = (table.double().repeat(1, 2) for table in tables(first + length, size))
    position = first + torch.arange(len(qkv)) % length
    split = qkv.double().view(len(qkv), -1, size)
    x = split[:, : heads + kv_heads]
    half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
    rotated_heads = x * cos[position][:, None] + half * direction * sin[position][:, None]
    return torch.cat((rotated_heads, split[:, heads + kv_heads :]), 1).view(len(qkv), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize(("variant", "size"), CASES)
def test_query_and_key_heads_match_hugging_face(variant, size, direction, dtype):
    heads, kv_heads, length, rows = 3, 1, 9, 18
    qkv = numbers(1, rows, (heads + 2 * kv_heads) * size, dtype=DTYPES[dtype])
    expected = rotated(qkv, heads, kv_heads, size, length, 0, direction)
    values = qkv[:, (heads + kv_heads) * size :].clone()
    rotate(qkv, heads, kv_heads, size, length, 0, direction, variant, dtype)
    assert_near(qkv, expected)
    assert torch.equal(qkv[:, (heads + kv_heads) * size :], values)


def test_decoding_continues_at_the_next_position():
    whole = numbers(1, 12, 6 * 64)
    last = whole[11:].clone()
    rotate(whole, 4, 1, 64, 12, 0, 1.0, "e64", "f32")
    rotate(last, 4, 1, 64, 1, 11, 1.0, "e64", "f32")
    assert torch.equal(last[0], whole[11])


@pytest.mark.parametrize(("variant", "size"), CASES)
def test_backward_undoes_forward(variant, size):
    before = numbers(1, 10, 7 * size)
    qkv = before.clone()
    for direction in (1.0, -1.0):
        rotate(qkv, 3, 2, size, 5, 0, direction, variant, "f32")
    assert_near(qkv, before, 1e-6)
