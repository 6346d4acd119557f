"""The norms of query and key heads against PyTorch in f64, forward and backward."""

import pytest
import torch
from interpreter import launch
from oracle import DTYPES, assert_near, blocks, by_name, exact, numbers, workspace
from partial_sums import KERNELS as PARTIAL_SUMS
from qk_norm import KERNELS

EPSILON = 1e-5
QUERY_HEADS, KEY_HEADS = 3, 2
CASES = [("e32", 32), ("e64", 64), ("e128", 128), ("e128m", 40), ("e128m", 96)]


def norm_heads(projected, weight, size):
    heads = projected.view(len(projected), -1, size)
    query, key, values = heads.split((QUERY_HEADS, KEY_HEADS, KEY_HEADS), 1)
    normed = [
        torch.nn.functional.rms_norm(x, (size,), w, EPSILON)
        for x, w in zip((query, key), weight.split(size), strict=True)
    ]
    return torch.cat((*normed, values), 1).view(projected.shape)


def inputs(rows, size, dtype):
    width = (QUERY_HEADS + 2 * KEY_HEADS) * size
    projected, dqkv = (numbers(seed, rows, width, dtype=DTYPES[dtype]) for seed in (1, 2))
    return projected, dqkv, (1 + numbers(3, 2 * size) / 4).to(DTYPES[dtype])


def sizes(rows, heads, size):
    return (rows * heads, QUERY_HEADS, QUERY_HEADS + KEY_HEADS, QUERY_HEADS + 2 * KEY_HEADS, size // 8, EPSILON)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("variant", "size"), CASES)
def test_forward_norms_query_and_key_heads_and_copies_values(variant, size, dtype):
    projected, qkv, weight = inputs(11, size, dtype)
    kernel = by_name(KERNELS, f"qk_norm_forward.{dtype}.{variant}")
    all_heads = QUERY_HEADS + 2 * KEY_HEADS
    grid = [blocks(11 * all_heads, kernel.constants["HEADS"])]
    launch(kernel, grid, projected, weight, qkv, *sizes(11, all_heads, size))
    assert_near(qkv, norm_heads(projected.double(), weight.double(), size))
    values = (QUERY_HEADS + KEY_HEADS) * size
    assert torch.equal(qkv[:, values:], projected[:, values:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3, 11])
@pytest.mark.parametrize(("variant", "size"), CASES)
def test_backward_gives_both_gradients(variant, size, parts, dtype):
    projected, dqkv, weight = inputs(11, size, dtype)
    dweight = numbers(5, 2 * size)
    leaf, leaf_weight = exact(projected), exact(weight)
    norm_heads(leaf, leaf_weight, size).backward(dqkv.double())
    expected = dweight.double() + leaf_weight.grad
    kernel = by_name(KERNELS, f"qk_norm_backward.{dtype}.{variant}")
    partials = workspace(parts, 2 * size)
    launch(kernel, [parts], projected, weight, dqkv, partials, *sizes(11, QUERY_HEADS + KEY_HEADS, size))
    add = by_name(PARTIAL_SUMS, "add_partial_sums.f32")
    launch(add, [blocks(2 * size, add.constants["BLOCK"])], partials, dweight, parts, 2 * size)
    assert_near(dqkv, leaf.grad)
    assert_near(dweight, expected, 1e-5)
