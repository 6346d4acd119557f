"""Rounding to fp8 against fixtures that NumPy makes in float64, with scales where cuBLASLt looks for them."""

from pathlib import Path

import pytest
import torch
from fp8 import KERNELS
from fp8_codes import TILE, quantized, tiles, unwritten
from interpreter import launch
from oracle import blocks, by_name, numbers
from safetensors.torch import load_file

GOLDEN = load_file(Path(__file__).resolve().parents[4] / "tests" / "golden" / "fp8.safetensors")


def padded(x):
    """Return the fixture's matrix with rows and columns that are multiples of 16, as a GPU's operands are."""
    rows, columns = (-(-size // 16) * 16 for size in x.shape)
    matrix = torch.zeros(rows, columns, dtype=x.dtype)
    matrix[: x.shape[0], : x.shape[1]] = x
    return matrix


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


def with_various_scales(rows, columns):
    """Return a matrix whose blocks have different scales than those that the transpose has in their place."""
    exponents = 3 * (torch.arange(rows) // 16)[:, None] - 5 * (torch.arange(columns) // 16)[None, :]
    return torch.ldexp(numbers(0, rows, columns), exponents).to(torch.bfloat16)


RECIPES = ["mx", "blocks", "tensor"]
SIZES = [(48, 144), (304, 272)]


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_only_requested_outputs_are_written(recipe, size, outputs):
    x = with_various_scales(*size)
    codes, transposed, scales, scales_transposed = quantized(x, recipe)
    expected = [(codes, scales), (transposed, scales_transposed)]
    codes, transposed, scales, scales_transposed = quantized(x, recipe, outputs)
    written = [(codes, scales), (transposed, scales_transposed)]
    for bit, shape in enumerate([size, size[::-1]]):
        codes, scales = expected[bit] if outputs >> bit & 1 else unwritten(recipe, *shape)
        assert torch.equal(written[bit][0], codes)
        # The scale of a whole matrix is written by a kernel without `outputs`.
        assert torch.equal(written[bit][1], expected[bit][1] if recipe == "tensor" else scales)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed_codes_and_scales_are_the_quantized_ones(recipe, size):
    rows, columns = size
    codes, expected, scales, expected_scales = quantized(with_various_scales(rows, columns), recipe)
    transposed, scales_transposed = unwritten(recipe, columns, rows)
    kernel = by_name(KERNELS, f"fp8_transpose_{recipe}.u8")
    launch(kernel, tiles(rows, columns), codes, scales, transposed, scales_transposed, rows, columns)
    assert torch.equal(transposed, expected)
    assert torch.equal(scales_transposed, expected_scales)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_numbers_are_those_of_the_codes(recipe, size):
    rows, columns = size
    codes, _, scales, _ = quantized(with_various_scales(rows, columns), recipe)
    # Every code, of which two are NaN.
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    out = torch.full((rows, columns), -99.0, dtype=torch.bfloat16)
    launch(by_name(KERNELS, f"fp8_dequantize_{recipe}.bf16"), tiles(rows, columns), codes, scales, out, rows, columns)
    expected = values(codes, scales, recipe)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0, equal_nan=True)
