"""AdamW against PyTorch in f64, and bitwise against the arithmetic of the CPU version."""

import math

import numpy as np
import pytest
import torch
from adamw import KERNELS
from interpreter import launch
from oracle import assert_near, blocks, by_name, numbers

BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1
LENGTHS = [1, 1023, 1024, 8191, 9000, 20_000]


def scalars(rate, step, clip_scale=1.0, apply=1.0):
    corrections = [1 - beta**step for beta in BETAS]
    return torch.tensor([rate, *corrections, clip_scale, apply])


def split_master(master):
    bits = master.view(torch.int32)
    high = (((bits.long() & 0xFFFFFFFF) + 0x8000) >> 16) & 0xFFFF
    return high.to(torch.int16).view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join_master(weight, low_bits):
    return ((weight.view(torch.int16).int() << 16) + low_bits.int()).view(torch.float32)


def step(weights, grad, first, second, values):
    """Run the kernel; `weights` is [weight], or [weight, low_bits]."""
    kernel = by_name(KERNELS, "adamw_step.f32" if len(weights) == 1 else "adamw_step.bf16")
    settings = [float(np.float32(x)) for x in (*BETAS, *(1 - b for b in BETAS), EPSILON)]
    grid = [blocks(len(grad), kernel.constants["PIECE"])]
    launch(kernel, grid, *weights, grad, first, second, values, *settings, DECAY, len(grad))


def cpu_step(weight, grad, first, second, values):
    """Compute `cpu::adamw::Update` in numpy with its roundings: PyTorch's square roots are not rounded to nearest."""
    f32 = np.float32
    rate, correction1, correction2, clip_scale, _ = values.double().tolist()
    decay, corrected = f32(1 - rate * float(f32(DECAY))), f32(rate / correction1)
    second_scale = f32(1 / math.sqrt(correction2))
    (beta1, beta2), (rest1, rest2) = map(f32, BETAS), (f32(1 - beta) for beta in BETAS)
    grad = f32(clip_scale) * grad
    first = beta1 * first + rest1 * grad
    second = beta2 * second + rest2 * grad * grad
    return decay * weight - corrected * first / (np.sqrt(second) * second_scale + f32(EPSILON)), first, second


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_split", [False, True])
def test_steps_match_pytorch_and_equal_the_cpu_bitwise(length, is_split):
    master = numbers(1, length)
    leaf = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([leaf], betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    weights = list(split_master(master)) if is_split else [master.clone()]
    first, second = torch.zeros(length), torch.zeros(length)
    cpu = [tensor.numpy() for tensor in (master, *torch.zeros(2, length))]
    for index in range(1, 7):
        grad, values = numbers(index + 1, length), scalars(0.01 / index, index, clip_scale=0.5)
        step(weights, grad, first, second, values)
        cpu = cpu_step(cpu[0], grad.numpy(), cpu[1], cpu[2], values)
        leaf.grad, optimizer.param_groups[0]["lr"] = 0.5 * grad.double(), 0.01 / index
        optimizer.step()
    ours = [join_master(*weights) if is_split else weights[0], first, second]
    assert all(np.array_equal(one.numpy(), other) for one, other in zip(ours, cpu, strict=True))
    state = optimizer.state[leaf]
    for one, other in zip(ours, (leaf, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        assert_near(one, other, 1e-6)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_step_not_to_be_applied_changes_nothing(is_split):
    weights = list(split_master(numbers(1, 100))) if is_split else [numbers(1, 100)]
    state = [*weights, numbers(2, 100), numbers(3, 100)]
    before = [tensor.clone() for tensor in state]
    step(weights, torch.full((100,), float("nan")), *state[-2:], scalars(0.1, 2, apply=0.0))
    assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))
