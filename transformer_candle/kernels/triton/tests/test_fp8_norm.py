"""The norm rounded to fp8 writes the bits of `normalize` followed by the kernels that round a matrix."""

import add_rms_norm
import pytest
import torch
from fp8_codes import bands, quantized, unwritten
from fp8_norm import KERNELS
from interpreter import launch
from oracle import blocks, by_name, numbers


@pytest.mark.parametrize(("rows", "width"), [(48, 144), (304, 272)])
@pytest.mark.parametrize("recipe", ["mx", "blocks"])
@pytest.mark.parametrize("outputs", [0, 1, 2, 3])
def test_it_writes_the_requested_codes_of_the_norm(recipe, rows, width, outputs):
    exponents = 3 * (torch.arange(rows) // 16)[:, None] - 5 * (torch.arange(width) // 16)[None, :]
    total = torch.ldexp(numbers(0, rows, width), exponents).to(torch.bfloat16)
    total[17, 3] = torch.inf
    weight = (1.0 + 0.3 * numbers(1, width)).to(torch.bfloat16)
    inv_rms = 0.5 + numbers(2, rows).abs().float()
    normed = torch.empty(rows, width, dtype=torch.bfloat16)
    kernel = by_name(add_rms_norm.KERNELS, "add_rms_norm_normalize.bf16")
    grid = [rows, blocks(width, kernel.constants["BLOCK"])]
    launch(kernel, grid, total, weight, inv_rms, normed, width)
    codes, scales = unwritten(recipe, rows, width)
    transposed, scales_transposed = unwritten(recipe, width, rows)
    written = [codes, transposed, scales, scales_transposed]
    kernel = by_name(KERNELS, f"fp8_normalize_{recipe}.bf16")
    launch(kernel, bands(rows, width, recipe), total, weight, inv_rms, *written, rows, width, outputs)
    assert all(map(torch.equal, written, quantized(normed, recipe, outputs)))
