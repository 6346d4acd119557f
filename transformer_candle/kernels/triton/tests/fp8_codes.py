"""The fp8 codes and scales of a matrix as the kernels of fp8.py write them, and buffers to compare them with."""

from __future__ import annotations

import torch
from fp8 import KERNELS
from interpreter import launch
from oracle import blocks, by_name

TILE = 128


def tiles(rows: int, columns: int) -> list[int]:
    """Return the grid with a program per tile."""
    return [blocks(rows, TILE), blocks(columns, TILE)]


def bands(rows: int, columns: int, recipe: str) -> list[int]:
    """Return the grid with a program per band of 32 rows of a tile for mx, per tile for the others."""
    first, second = tiles(rows, columns)
    return [4 * first if recipe == "mx" else first, second]


def unwritten(recipe: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for the codes and the scales of a matrix, filled with a pattern."""
    grid = tiles(rows, columns)
    codes = torch.full((rows, columns), 0xFF, dtype=torch.uint8)
    if recipe == "mx":
        return codes, torch.full((grid[0] * grid[1] * 512,), 0xFF, dtype=torch.uint8)
    return codes, torch.full((grid[1], rows) if recipe == "blocks" else (1,), -99.0)


def quantized(x: torch.Tensor, recipe: str, outputs: int = 3) -> tuple[torch.Tensor, ...]:
    """Return codes, transposed codes, scales and transposed scales as the kernels write them."""
    rows, columns = x.shape
    codes, scales = unwritten(recipe, rows, columns)
    transposed, scales_transposed = unwritten(recipe, columns, rows)
    grid = bands(rows, columns, recipe)
    if recipe == "tensor":
        partials, largest = torch.full((grid[0] * grid[1],), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        launch(by_name(KERNELS, "fp8_largest.bf16"), grid, x, partials, rows, columns)
        kernel = by_name(KERNELS, "fp8_scale.bf16")
        launch(kernel, [1], partials, largest, scales, scales_transposed, partials.numel())
        kernel = by_name(KERNELS, "fp8_quantize_tensor.bf16")
        launch(kernel, grid, x, largest, codes, transposed, rows, columns, outputs)
    else:
        kernel = by_name(KERNELS, f"fp8_quantize_{recipe}.bf16")
        launch(kernel, grid, x, codes, transposed, scales, scales_transposed, rows, columns, outputs)
    return codes, transposed, scales, scales_transposed
