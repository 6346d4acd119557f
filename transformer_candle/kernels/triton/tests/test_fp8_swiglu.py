"""SwiGLU rounded to fp8 writes the bits of SwiGLU's kernels followed by those that round a matrix."""

import pytest
import swiglu
import torch
from fp8_codes import bands, quantized, unwritten
from fp8_swiglu import KERNELS
from interpreter import launch
from oracle import blocks, by_name, numbers


def with_various_scales(seed, rows, columns):
    """Return a matrix whose squares of 16 have different scales, around 1 so that sigmoid is not all 0 and 1."""
    exponents = (3 * (torch.arange(rows) // 16)[:, None] + 5 * (torch.arange(columns) // 16)[None, :]) % 17 - 13
    return torch.ldexp(numbers(seed, rows, columns), exponents).to(torch.bfloat16)


def inputs(rows, width):
    """Return gate_up with an infinity, and dout."""
    gate_up = with_various_scales(1, rows, 2 * width)
    gate_up[17, 3] = torch.inf
    return gate_up, with_various_scales(2, rows, width)


def run_unfused(name, gate_up, other):
    """Run a kernel of swiglu.py."""
    rows, width = other.shape
    kernel = by_name(swiglu.KERNELS, name)
    launch(kernel, [rows, blocks(width, kernel.constants["BLOCK"])], gate_up, other, width)


RECIPES = ["mx", "blocks"]
SIZES = [(rows, width) for rows in (48, 304) for width in (128, 384)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("outputs", [0, 1, 2, 3])
def test_forward_writes_the_requested_codes_of_the_activation(recipe, rows, width, outputs):
    gate_up, activated = inputs(rows, width)
    run_unfused("swiglu_forward.bf16", gate_up, activated)
    before = gate_up.clone()
    codes, scales = unwritten(recipe, rows, width)
    transposed, scales_transposed = unwritten(recipe, width, rows)
    written = [codes, transposed, scales, scales_transposed]
    kernel = by_name(KERNELS, f"fp8_swiglu_{recipe}.bf16")
    launch(kernel, bands(rows, width, recipe), gate_up, *written, rows, width, outputs)
    assert all(map(torch.equal, written, quantized(activated, recipe, outputs)))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_writes_the_codes_of_gradients_and_activation(recipe, rows, width):
    gate_up, dout = inputs(rows, width)
    expected_dgate_up, expected_activated = gate_up.clone(), dout.clone()
    run_unfused("swiglu_backward_recomputing.bf16", expected_dgate_up, expected_activated)
    before = gate_up.clone(), dout.clone()
    codes, scales = unwritten(recipe, rows, 2 * width)
    transposed, scales_transposed = unwritten(recipe, 2 * width, rows)
    activated, activated_scales = unwritten(recipe, width, rows)
    written = [codes, transposed, scales, scales_transposed, activated, activated_scales]
    kernel = by_name(KERNELS, f"fp8_swiglu_backward_{recipe}.bf16")
    launch(kernel, bands(rows, width, recipe), gate_up, dout, *written, rows, width)
    assert all(map(torch.equal, written[:4], quantized(expected_dgate_up, recipe)))
    _, expected_activated, _, expected_scales = quantized(expected_activated, recipe)
    assert torch.equal(activated, expected_activated)
    assert torch.equal(activated_scales, expected_scales)
    assert torch.equal(gate_up, before[0])
    assert torch.equal(dout, before[1])
