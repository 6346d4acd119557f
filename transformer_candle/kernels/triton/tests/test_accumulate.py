"""Adding one buffer to another against PyTorch, bit for bit."""

import pytest
import torch
from accumulate import KERNELS
from interpreter import launch
from oracle import blocks, numbers

(KERNEL,) = KERNELS


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 10_003])
def test_every_element_is_added_once(length):
    total, addend = numbers(1, length), numbers(2, length)
    expected = total + addend
    launch(KERNEL, [blocks(length, KERNEL.constants["BLOCK"])], total, addend, length)
    assert torch.equal(total, expected)


def test_what_lies_behind_is_left_alone():
    memory, addend = numbers(1, 64), numbers(2, 64)
    before = memory.clone()
    launch(KERNEL, [1], memory, addend, 40)
    assert torch.equal(memory[:40], before[:40] + addend[:40])
    assert torch.equal(memory[40:], before[40:])
