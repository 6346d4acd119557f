"""The fixtures in tests/golden are what PyTorch computes, and not something edited since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from make_models import MODELS
from make_models import fixture as model_fixture
from make_operations import GOLDEN, OPERATIONS, Tensors
from make_operations import fixture as operation_fixture
from safetensors.torch import load_file


def assert_stored(name: str, tensors: Tensors, tolerance: float) -> None:
    """Check that the file holds these tensors; those of bfloat16, rounded by processor, may have other values."""
    stored = load_file(GOLDEN / f"{name}.safetensors")
    assert stored.keys() == tensors.keys()
    exact = [key for key in stored if not key.startswith("bf16.")]
    torch.testing.assert_close(
        {key: tensors[key] for key in exact},
        {key: stored[key] for key in exact},
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operation_fixtures_are_pytorchs(operation: Callable[[], Tensors]) -> None:
    assert_stored(operation.__name__, operation_fixture(operation), 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_model_fixtures_are_transformers(name: str) -> None:
    assert_stored(f"model_{name}", model_fixture(name), 1e-12)
