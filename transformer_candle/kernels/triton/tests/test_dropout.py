"""Dropout against the same hash in Python's integers, which have no width."""

import numpy as np
import pytest
import torch
from dropout import KERNELS
from interpreter import launch
from oracle import DTYPES, blocks, by_name, numbers

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
SEED, FIRST_ROW, MODULE = 0xFEDC_BA98_7654_3210, (1 << 32) - 2, 13
PROBABILITY = 0.3
THRESHOLD, SCALE = int(PROBABILITY * 2**32), float(np.float32(1 / (1 - PROBABILITY)))


def mix(counter: int) -> int:
    bits = counter + 0x9E3779B97F4A7C15 & LONG
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & LONG
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & LONG
    return bits ^ bits >> 31


def mix32(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x7FEB352D & WORD
    bits = (bits ^ bits >> 15) * 0x846CA68B & WORD
    return bits ^ bits >> 16


def expected_factors(rows: int, width: int) -> torch.Tensor:
    key = mix(SEED ^ mix(MODULE))
    of_rows = [mix(key ^ (FIRST_ROW + row)) for row in range(rows)]
    hashes = [[mix32(mix32(column ^ bits & WORD) ^ bits >> 32) for column in range(width)] for bits in of_rows]
    return torch.tensor([[SCALE if one >= THRESHOLD else 0.0 for one in row] for row in hashes])


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def run(name: str, source: torch.Tensor, target: torch.Tensor, enabled: bool = True) -> None:
    words = [SEED & WORD, SEED >> 32, FIRST_ROW & WORD, FIRST_ROW >> 32, int(enabled)]
    state, module, kernel = torch.tensor(words, dtype=torch.uint32), mix(MODULE), by_name(KERNELS, name)
    rows, width = source.shape
    grid = [rows, blocks(width, kernel.constants["BLOCK"])]
    words = [signed(module & WORD), signed(module >> 32), signed(THRESHOLD)]
    launch(kernel, grid, source, state, target, *words, SCALE, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 1040)])
def test_masks_are_the_hash_bit_for_bit(rows, width, dtype):
    factors = expected_factors(rows, width)
    x, dx = numbers(1, rows, width, dtype=DTYPES[dtype]), numbers(2, rows, width, dtype=DTYPES[dtype])
    out, sum_ = torch.full_like(x, float("nan")), dx.clone()
    run(f"dropout_forward.{dtype}", x, out)
    assert torch.equal(out, (factors * x.float()).to(x.dtype))
    run(f"dropout_backward.{dtype}", x, sum_)
    assert torch.equal(sum_, (dx.float() + factors * x.float()).to(x.dtype))
    assert 0.2 < (factors == 0).float().mean() < 0.4 or factors.numel() < 100


def test_disabled_nothing_is_dropped():
    x, dx = numbers(1, 3, 32), numbers(2, 3, 32)
    out, sum_ = torch.empty_like(x), dx.clone()
    run("dropout_forward.f32", x, out, enabled=False)
    run("dropout_backward.f32", x, sum_, enabled=False)
    assert torch.equal(out, x)
    assert torch.equal(sum_, dx + x)
