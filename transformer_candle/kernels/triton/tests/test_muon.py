"""Muon's element-wise passes: bitwise against the arithmetic of the CPU version, sums against PyTorch in f64."""

import numpy as np
import pytest
import torch
from interpreter import launch
from muon import KERNELS
from oracle import DTYPES, blocks, by_name, numbers, workspace
from test_adamw import join_master, split_master

LENGTHS = [16, 1024, 32_768, 40_000]
MU, REST = float(np.float32(0.95)), float(np.float32(1 - 0.95))


def kernel(name, dtype):
    return by_name(KERNELS, f"muon_{name}.{dtype}")


def scalars(rate=0.01, clip_scale=1.0, apply=1.0):
    return torch.tensor([rate, 1.0, 1.0, clip_scale, apply])


def momentum_of(dtype, momentum, grad, values):
    update = torch.full(momentum.shape, float("nan"), dtype=DTYPES[dtype])
    kernel_declaration = kernel("momentum", dtype)
    grid = [blocks(len(grad), kernel_declaration.constants["BLOCK"])]
    launch(kernel_declaration, grid, momentum, grad, update, values, MU, REST, len(grad))
    return update


def normalized(dtype, batch):
    squares, normalize = kernel("squares", dtype), kernel("normalize", dtype)
    count, length = batch.shape
    pieces = blocks(length, squares.constants["PIECE"])
    partials, target = workspace(2 * pieces * count), torch.full(batch.shape, float("nan"), dtype=batch.dtype)
    launch(squares, [pieces, count], batch, partials, length)
    launch(normalize, [pieces, count], batch, target, partials, length)
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_momentum_equals_the_cpu_bitwise(length, dtype):
    momentum, grad = numbers(1, length), numbers(2, length)
    f32 = np.float32
    share = f32(REST) * (f32(0.5) * grad.numpy())
    expected = f32(MU) * momentum.numpy() + share
    update = momentum_of(dtype, momentum, grad, scalars(clip_scale=0.5))
    assert np.array_equal(momentum.numpy(), expected)
    assert torch.equal(update, torch.from_numpy(f32(MU) * expected + share).to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_not_to_be_applied_changes_nothing(dtype):
    momentum, grad, values = numbers(1, 100), torch.full((100,), float("nan")), scalars(apply=0.0)
    assert torch.equal(momentum_of(dtype, momentum, grad, values), torch.zeros(100, dtype=DTYPES[dtype]))
    assert torch.equal(momentum, numbers(1, 100))
    weights = list(split_master(numbers(2, 100))) if dtype == "bf16" else [numbers(2, 100)]
    before = [weight.clone() for weight in weights]
    launch(kernel("step", dtype), [1], *weights, numbers(3, 100, dtype=DTYPES[dtype]), values, 0.2, 0.1, 100)
    assert all(torch.equal(one, other) for one, other in zip(weights, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_each_matrix_of_a_batch_has_its_own_norm(length, dtype):
    batch = numbers(1, 3, length, dtype=DTYPES[dtype]) * torch.tensor([[1.0], [1e3], [0.0]])
    batch = batch.to(DTYPES[dtype])
    norms = batch.double().norm(dim=1, keepdim=True).clamp_min(1e-7)
    expected = (batch.float() * (1 / norms).float()).to(DTYPES[dtype])
    assert torch.equal(normalized(dtype, batch), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 33, 80])
def test_the_polynomial_equals_the_cpu_bitwise(size, dtype):
    gram, square = numbers(1, 2, size, size, dtype=DTYPES[dtype]), numbers(2, 2, size, size, dtype=DTYPES[dtype])
    a, b, c = (float(np.float32(x)) for x in (3.4445, -4.7750, 2.0315))
    gram_term = np.float32(b) * gram.float().numpy()
    gram_term = np.where(np.eye(size, dtype=bool), np.float32(a) + gram_term, gram_term)
    expected = torch.from_numpy(gram_term + np.float32(c) * square.float().numpy()).to(DTYPES[dtype])
    kernel_declaration = kernel("polynomial", dtype)
    grid = [blocks(size * size, kernel_declaration.constants["BLOCK"]), 2]
    launch(kernel_declaration, grid, gram, square, size, a, b, c, size * size)
    assert torch.equal(square, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_step_equals_the_cpu_bitwise(length, dtype):
    master, update = numbers(1, length), numbers(2, length, dtype=DTYPES[dtype])
    weights = list(split_master(master)) if dtype == "bf16" else [master.clone()]
    rate, scale, f32 = float(np.float32(0.01)), float(np.float32(0.2 * 50)), np.float32
    decay, scaled = f32(1 - rate * float(f32(0.1))), f32(rate * scale)
    expected = decay * master.numpy() - scaled * update.float().numpy()
    kernel_declaration = kernel("step", dtype)
    grid = [blocks(length, kernel_declaration.constants["BLOCK"])]
    launch(kernel_declaration, grid, *weights, update, scalars(rate), scale, 0.1, length)
    ours = join_master(*weights) if dtype == "bf16" else weights[0]
    assert np.array_equal(ours.numpy(), expected)
