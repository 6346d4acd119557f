"""RMS norm against PyTorch in f64, forward and backward."""

from dataclasses import replace

import pytest
import torch
from add_rms_norm import KERNELS
from interpreter import launch
from oracle import DTYPES, assert_near, blocks, by_name, exact, numbers, workspace
from partial_sums import KERNELS as PARTIAL_SUMS

EPSILON = 1e-5
WIDTHS = [(1024, 64), (1024, 1024), (2048, 1040), (4096, 2064), (8192, 8192)]


def norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * weight


def inputs(width, dtype, rows=5):
    return [numbers(seed, rows, width, dtype=DTYPES[dtype]) for seed in (1, 2)] + [
        (1 + numbers(3, width) / 4).to(DTYPES[dtype])
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "width"), WIDTHS)
def test_forward_matches_pytorch_and_normalize_repeats_it(block, width, dtype):
    x, _, weight = inputs(width, dtype)
    normed, second_output, inv_rms = torch.empty_like(x), torch.empty_like(x), torch.empty(5)
    kernel = by_name(KERNELS, f"add_rms_norm_forward.{dtype}.h{block}")
    launch(kernel, [5], x, weight, normed, inv_rms, width, EPSILON)
    assert_near(normed, norm(x.double(), weight.double()))
    assert_near(inv_rms, torch.rsqrt((x.double() ** 2).mean(-1) + EPSILON), 1e-6)
    kernel = by_name(KERNELS, f"add_rms_norm_normalize.{dtype}")
    launch(kernel, [5, blocks(width, kernel.constants["BLOCK"])], x, weight, inv_rms, second_output, width)
    assert torch.equal(normed, second_output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "width"), WIDTHS)
def test_forward_add_normalizes_the_rounded_sum(block, width, dtype):
    x, output, weight = inputs(width, dtype)
    total, normed, inv_rms = torch.empty_like(x), torch.empty_like(x), torch.empty(5)
    kernel = by_name(KERNELS, f"add_rms_norm_forward_add.{dtype}.h{block}")
    launch(kernel, [5], x, output, weight, total, normed, inv_rms, width, EPSILON)
    assert torch.equal(total, (x.float() + output.float()).to(x.dtype))
    assert_near(normed, norm(total.double(), weight.double()))
    assert_near(inv_rms, torch.rsqrt((total.double() ** 2).mean(-1) + EPSILON), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "width"), WIDTHS)
@pytest.mark.parametrize(("rows", "parts"), [(5, 3), (4, 4)])
def test_backward_accumulates_both_gradients(rows, parts, block, width, dtype):
    total, dnormed, weight = inputs(width, dtype, rows)
    dtotal, dweight = numbers(4, rows, width, dtype=DTYPES[dtype]), numbers(5, width)
    leaf, leaf_weight = exact(total), exact(weight)
    norm(leaf, leaf_weight).backward(dnormed.double())
    expected = [dtotal.double() + leaf.grad, dweight.double() + leaf_weight.grad]
    inv_rms = torch.rsqrt((total.double() ** 2).mean(-1) + EPSILON).float()
    partials = workspace(parts, width)
    kernel = by_name(KERNELS, f"add_rms_norm_backward.{dtype}.h{block}")
    launch(kernel, [parts], total, weight, inv_rms, dnormed, dtotal, partials, rows, width)
    kernel = by_name(PARTIAL_SUMS, "add_partial_sums.f32")
    launch(kernel, [blocks(width, kernel.constants["BLOCK"])], partials, dweight, parts, width)
    assert_near(dtotal, expected[0])
    assert_near(dweight, expected[1], 1e-5)


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (4, 4), (7, 3), (9, 2)])
def test_loading_a_row_ahead_changes_no_bit(rows, parts):
    total, dnormed, weight = inputs(2048, "bf16", rows)
    inv_rms = torch.rsqrt((total.double() ** 2).mean(-1) + EPSILON).float()
    prefetching = by_name(KERNELS, "add_rms_norm_backward.bf16.h2048")
    assert prefetching.constants["PREFETCH"]
    results = []
    for kernel in (prefetching, replace(prefetching, constants=prefetching.constants | {"PREFETCH": False})):
        dtotal, partials = numbers(4, rows, 2048, dtype=torch.bfloat16), workspace(parts, 2048)
        launch(kernel, [parts], total, weight, inv_rms, dnormed, dtotal, partials, rows, 2048)
        results.append((dtotal, partials))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
