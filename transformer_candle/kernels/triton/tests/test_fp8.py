"""Rounding to fp8 against fixtures that NumPy makes in float64, with scales where cuBLASLt looks for them."""

from pathlib import Path

import pytest
import torch
from fp8 import KERNELS
from interpreter import launch
from oracle import blocks, by_name
from safetensors.torch import load_file

GOLDEN = load_file(Path(__file__).resolve().parents[4] / "tests" / "golden" / "fp8.safetensors")
TILE = 128


def padded(x):
    """Return the fixture's matrix with rows and columns that are multiples of 16, as a GPU's operands are."""
    rows, columns = (-(-size // 16) * 16 for size in x.shape)
    matrix = torch.zeros(rows, columns, dtype=x.dtype)
    matrix[: x.shape[0], : x.shape[1]] = x
    return matrix


def quantized(x, recipe):
    """Return codes, transposed codes, scales and transposed scales as the kernels write them."""
    rows, columns = x.shape
    grid = [blocks(rows, TILE), blocks(columns, TILE)]
    codes, transposed = torch.full_like(x, 1, dtype=torch.uint8), torch.full((columns, rows), 1, dtype=torch.uint8)
    if recipe == "mx":
        scales = [torch.full((grid[0] * grid[1] * 512,), 99, dtype=torch.uint8) for _ in range(2)]
        launch(
            by_name(KERNELS, "fp8_quantize_mx.bf16"),
            [4 * grid[0], grid[1]],
            x,
            codes,
            transposed,
            *scales,
            rows,
            columns,
        )
    elif recipe == "blocks":
        scales = [torch.full((grid[1], rows), torch.nan), torch.full((grid[0], columns), torch.nan)]
        launch(by_name(KERNELS, "fp8_quantize_blocks.bf16"), grid, x, codes, transposed, *scales, rows, columns)
    else:
        partials, largest = torch.full((grid[0] * grid[1],), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        scales = [torch.zeros(1), torch.zeros(1)]
        launch(by_name(KERNELS, "fp8_largest.bf16"), grid, x, partials, rows, columns)
        launch(by_name(KERNELS, "fp8_scale.bf16"), [1], partials, largest, *scales, partials.numel())
        launch(by_name(KERNELS, "fp8_quantize_tensor.bf16"), grid, x, largest, codes, transposed, rows, columns)
    return codes, transposed, *scales


def scale_of_each(scales, recipe, rows, columns):
    """Return the scale of every number of a matrix, read from where a GEMM finds it."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    if recipe == "mx":
        tile = (row // TILE) * blocks(columns, TILE) + column // TILE
        outer, inner = row % TILE, column % TILE // 32
        exponents = scales[tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner]
        return torch.ldexp(torch.ones(rows, columns).double(), exponents.int() - 127)
    return scales[column // TILE, row].double() if recipe == "blocks" else scales.double()


def values(codes, scales, recipe):
    return codes.view(torch.float8_e4m3fn).double() * scale_of_each(scales, recipe, *codes.shape)


@pytest.mark.parametrize(("recipe", "name"), [("mx", "x_32_RC"), ("blocks", "x_128_RC"), ("tensor", "x_tensor_RC")])
def test_numbers_and_their_transposes_are_those_of_numpy(recipe, name):
    x = padded(GOLDEN["x_RC"])
    codes, transposed, scales, scales_transposed = quantized(x, recipe)
    expected = padded(GOLDEN[name]).double()
    assert torch.equal(values(codes, scales, recipe), expected)
    assert torch.equal(values(transposed, scales_transposed, recipe), expected.T)


@pytest.mark.parametrize(("recipe", "name"), [("mx", "every_32"), ("blocks", "every_128")])
def test_every_bf16_number_rounds_as_in_numpy(recipe, name):
    every = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(2048, 32)
    codes, transposed, scales, scales_transposed = quantized(every, recipe)
    expected = GOLDEN[name].double()
    torch.testing.assert_close(values(codes, scales, recipe), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        values(transposed, scales_transposed, recipe), expected.T, rtol=0, atol=0, equal_nan=True
    )
