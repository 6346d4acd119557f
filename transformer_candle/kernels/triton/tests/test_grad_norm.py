"""Gradient norm against PyTorch in f64, and the clip scale."""

import pytest
import torch
from grad_norm import KERNELS
from interpreter import launch
from oracle import blocks, by_name, numbers, workspace

SQUARES, TOTAL, CLIP = (by_name(KERNELS, f"grad_norm_{name}.f32") for name in ("squares", "total", "clip"))


def norm(grads):
    pieces = blocks(len(grads), SQUARES.constants["PIECE"])
    partials, result = workspace(max(2 * pieces, 1)), workspace(1)
    if pieces:
        launch(SQUARES, [pieces], grads, partials, len(grads))
    launch(TOTAL, [1], partials, result, pieces)
    return result


@pytest.mark.parametrize("length", [0, 1, 2047, 32_767, 32_768, 32_769, 100_003])
def test_norm_equals_f64_at_any_length(length):
    grads = numbers(length, length)
    assert torch.equal(norm(grads), grads.double().norm().float().reshape(1))


def test_all_pieces_are_summed():
    sums = numbers(1, 5000).abs().double()
    result = workspace(1)
    launch(TOTAL, [1], sums.view(torch.float32), result, 5000)
    assert torch.equal(result, sums.sum().sqrt().float().reshape(1))


def test_norm_neither_overflows_nor_underflows():
    for size in (1e25, 1e-30):
        grads = torch.tensor([3 * size, -4 * size])
        assert torch.equal(norm(grads), grads.double().norm().float().reshape(1))


def clipped(value, limit):
    scalars = torch.full((5,), 9.0)
    launch(CLIP, [1], torch.tensor([value]), float(limit), scalars)
    return scalars


@pytest.mark.parametrize("value", [0.5, 1.0, 4.0, 1e20])
def test_clip_scale_matches_pytorch(value):
    parameter = torch.zeros(1)
    parameter.grad = torch.tensor([value])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    scalars = clipped(value, 1.0)
    assert scalars[[0, 1, 2, 4]].tolist() == [9, 9, 9, 1]
    torch.testing.assert_close(scalars[3:4] * value, parameter.grad, rtol=2e-7, atol=0)


def test_without_a_limit_nothing_is_clipped():
    assert clipped(4.0, float("inf"))[3:].tolist() == [1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_norm_prevents_the_update(bad):
    assert not norm(torch.tensor([1.0, bad])).isfinite()
    assert clipped(bad, 1.0)[4] == 0
