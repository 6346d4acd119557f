"""SwiGLU against PyTorch in f64."""

import pytest
import torch
from interpreter import launch
from oracle import DTYPES, assert_near, blocks, by_name, exact, numbers
from swiglu import KERNELS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1024), (5, 2064)])
def test_output_and_gradients_match_pytorch(rows, width, dtype):
    gate_up = 4 * numbers(1, rows, 2 * width, dtype=DTYPES[dtype])
    dout = numbers(2, rows, width, dtype=DTYPES[dtype])
    leaf = exact(gate_up)
    expected = torch.nn.functional.silu(leaf[:, :width]) * leaf[:, width:]
    expected.backward(dout.double())
    out, dgate_up, dagain = torch.empty_like(dout), gate_up.clone(), gate_up.clone()
    kernel = by_name(KERNELS, f"swiglu_forward.{dtype}")
    grid = [rows, blocks(width, kernel.constants["BLOCK"])]
    launch(kernel, grid, gate_up, out, width)
    launch(by_name(KERNELS, f"swiglu_backward.{dtype}"), grid, dgate_up, dout, width)
    assert_near(out, expected)
    assert_near(dgate_up, leaf.grad)
    launch(by_name(KERNELS, f"swiglu_backward_recomputing.{dtype}"), grid, dagain, dout, width)
    assert torch.equal(dagain, dgate_up)
    assert torch.equal(dout, out)


def test_extreme_gates_neither_overflow_nor_vanish():
    gate_up = torch.full((1, 32), 2.0)
    gate_up[0, :3] = torch.tensor([1e4, -1e4, float("nan")])
    out, dgate_up = torch.empty(1, 16), gate_up.clone()
    launch(by_name(KERNELS, "swiglu_forward.f32"), [1, 1], gate_up, out, 16)
    launch(by_name(KERNELS, "swiglu_backward.f32"), [1, 1], dgate_up, torch.ones(1, 16), 16)
    assert (out[0, 0], out[0, 1], out[0, 2].isnan()) == (2e4, 0.0, True)
    assert (dgate_up[0, 0], dgate_up[0, 1], dgate_up[0, 2].isnan()) == (2.0, 0.0, True)
