"""Fixtures: the emulated driver, built once, and the trainer that runs on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cuda_emulator.library import KERNELS, Emulator, build
from cuda_emulator.runs import EMULATED_TRAINER, Runs
from workspace import REPOSITORY, Workspace


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """A GPU of 1 GiB whose kernels run in the environment that has Triton."""
    folder = tmp_path_factory.mktemp("cuda")
    build(folder)
    python = os.environ.get("CUDA_EMULATOR_PYTHON", str(REPOSITORY / ".venv-oracle" / "bin" / "python"))
    return Emulator(folder, python, {"memory": 1 << 30, "context": 64 << 20})


@pytest.fixture
def kernels() -> Path:
    """The folder of the PTX that is checked in."""
    return KERNELS / "ptx"


@pytest.fixture
def runs(tmp_path: Path, emulator: Emulator) -> Runs:
    """A place for runs of tiny models, on the CPU and on the emulated GPU."""
    assert EMULATED_TRAINER.exists(), f"{EMULATED_TRAINER} is missing: make cuda-emulated"
    return Runs(Workspace(tmp_path), emulator)
