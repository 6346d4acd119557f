"""The fixtures in tests/golden are what PyTorch computes, and not something edited since."""

from __future__ import annotations

import pytest
import torch
from make_models import fixture as model_fixture
from make_operations import GOLDEN, OPERATIONS
from make_operations import fixture as operation_fixture
from safetensors.torch import load_file


def same(name: str, made: dict[str, torch.Tensor], tolerance: float) -> None:
    stored = load_file(GOLDEN / f"{name}.safetensors")
    assert stored.keys() == made.keys()
    for key, value in stored.items():
        torch.testing.assert_close(made[key], value, rtol=tolerance, atol=tolerance, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operation_fixtures_are_pytorchs(operation) -> None:  # type: ignore[no-untyped-def]
    same(operation.__name__, operation_fixture(operation), 1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_model_fixtures_are_transformers(tied: bool) -> None:
    made = model_fixture(tied)
    # How PyTorch rounds in bfloat16 depends on the processor it runs on.
    exact = {name: value for name, value in made.items() if not name.startswith("bf16.")}
    name = "model_tied" if tied else "model_untied"
    stored = load_file(GOLDEN / f"{name}.safetensors")
    assert stored.keys() == made.keys()
    for key, value in exact.items():
        torch.testing.assert_close(value, stored[key], rtol=1e-9, atol=1e-9, msg=lambda text: f"{key}: {text}")
