"""A bias and its gradient against PyTorch in f64, and the sum of partial sums."""

import pytest
import torch
from bias import KERNELS
from interpreter import launch
from oracle import DTYPES, assert_near, blocks, by_name, numbers, workspace
from partial_sums import KERNELS as PARTIAL_SUMS


def add_partial_sums(partials, sums):
    parts, width = partials.shape
    kernel = by_name(PARTIAL_SUMS, "add_partial_sums.f32")
    launch(kernel, [blocks(width, kernel.constants["BLOCK"])], partials, sums, parts, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 1024, 1040])
def test_forward_adds_the_bias_to_every_row(width, dtype):
    y, bias = numbers(1, 5, width, dtype=DTYPES[dtype]), numbers(2, width, dtype=DTYPES[dtype])
    expected = (y.float() + bias.float()).to(y.dtype)
    kernel = by_name(KERNELS, f"bias_forward.{dtype}")
    launch(kernel, [5, blocks(width, kernel.constants["BLOCK"])], y, bias, width)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "parts"), [(5, 5), (32, 1), (100, 3), (65, 128)])
def test_backward_adds_the_sum_of_the_rows(rows, parts, dtype):
    width = 48
    dy, dbias = numbers(1, rows, width, dtype=DTYPES[dtype]), numbers(2, width)
    expected = dbias.double() + dy.double().sum(0)
    partials = workspace(parts, width)
    kernel = by_name(KERNELS, f"bias_backward.{dtype}")
    launch(kernel, [parts, blocks(width, kernel.constants["BLOCK"])], dy, partials, rows, width)
    add_partial_sums(partials, dbias)
    assert_near(dbias, expected, 1e-5)


def test_any_number_of_partial_sums_is_added():
    rows = by_name(PARTIAL_SUMS, "add_partial_sums.f32").constants["ROWS"]
    for parts in (1, rows, rows + 1, 512):
        partials, sums = numbers(parts, parts, 48), numbers(1, 48)
        expected = sums.double() + partials.double().sum(0)
        add_partial_sums(partials, sums)
        assert_near(sums, expected)
