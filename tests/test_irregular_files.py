"""A pipe, a device or an absurdly large file in place of a file of a run or a model is a sentence, never a wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from workspace import ORCHESTRATE, REPOSITORY, TRAINER, Workspace

GOLDEN = REPOSITORY / "tests/golden/checkpoints/first_bf16_mixture/run"
STEP = "step-00000004"
# Ended by this, a command exits with 124.
PATIENCE = ["timeout", "60"]


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


@pytest.fixture
def model(workspace: Workspace) -> Path:
    """A model directory that is no checkpoint."""
    folder = workspace.root / "model"
    shutil.copytree(GOLDEN / "checkpoints" / STEP, folder, ignore=shutil.ignore_patterns("*state*", "MANIFEST*"))
    return folder


@pytest.mark.parametrize("put", [os.mkfifo, zero, huge])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_s_files_are_regular(workspace: Workspace, model: Path, name: str, put: Callable[[Path], None]) -> None:
    (model / name).unlink()
    put(model / name)
    for program, command in ((TRAINER, ["generate", "--prompt=a"]), (ORCHESTRATE, ["export", "--format=hf"])):
        process = workspace.command(*PATIENCE, program, *command, "--checkpoint", model)
        assert process.code in (2, 5), (command, process)
        assert name in process.err and "a bug" not in process.err


@pytest.mark.parametrize("put", [os.mkfifo, zero])
def test_the_index_of_weights_is_regular(workspace: Workspace, model: Path, put: Callable[[Path], None]) -> None:
    (model / "model.safetensors").unlink()
    put(model / "model.safetensors.index.json")
    for program, command in ((TRAINER, ["generate", "--prompt=a"]), (ORCHESTRATE, ["export", "--format=hf"])):
        process = workspace.command(*PATIENCE, program, *command, "--checkpoint", model)
        assert process.code in (1, 2, 5), process
        assert "model.safetensors.index.json" in process.err and "a bug" not in process.err


@pytest.mark.parametrize("put", [os.mkfifo, zero])
@pytest.mark.parametrize(
    "name", ["resolved_config.json", "metrics.jsonl", "ledger.jsonl", "checkpoints/latest", "checkpoints/best"]
)
def test_a_run_s_files_are_regular(workspace: Workspace, name: str, put: Callable[[Path], None]) -> None:
    shutil.copytree(GOLDEN, workspace.run_folder("E"))
    path = workspace.run_folder("E") / name
    path.unlink(missing_ok=True)
    put(path)
    for program, command in (
        (ORCHESTRATE, ["watch", "E", "--once"]),
        (TRAINER, ["train", "--config=runs/E/training.yaml", "--resume"]),
        (ORCHESTRATE, ["export", "--experiment=E", "--format=hf", "--out=out"]),
    ):
        process = workspace.command(*PATIENCE, program, *command)
        assert process.code != 124 and "a bug" not in process.err, (command, process)
