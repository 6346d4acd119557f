"""Functions shared by the kernels' tests: random inputs, kernels by name, error bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from declaration import Kernel

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
BOUNDS = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
"""Bounds of the relative error in norm: rounding of the result to bf16, or of a sum in f32."""


def by_name(kernels: Sequence[Kernel], name: str) -> Kernel:
    """Return the declared kernel of this name."""
    return next(kernel for kernel in kernels if kernel.name == name)


def blocks(elements: int, block: int) -> int:
    """Return the number of programs with `block` elements each."""
    return -(-elements // block)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers, a function of the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def workspace(*shape: int) -> torch.Tensor:
    """Return a tensor of NaN: no kernel may depend on what its workspace held."""
    return torch.full(shape, float("nan"))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of autograd with the same values in f64."""
    return tensor.detach().double().requires_grad_()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor | None, bound: float | None = None) -> None:
    """Assert that the relative error in norm is at most the bound, by default that of the dtype."""
    assert theirs is not None and ours.shape == theirs.shape
    theirs = theirs.detach().double()
    error = ((ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-300)).item()
    assert error <= (bound or BOUNDS[ours.dtype]), f"relative error {error:.1e} in {ours.dtype}"
