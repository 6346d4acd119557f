"""A GPU that is asked for and that training would not find is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from orchestrator import _native, gpus
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.settings import Settings
from workspace import TINY_MODEL, Workspace

ABSENT = "cuda:63"
"""A GPU that no machine has."""
CUDA = "transformer-candle 0.1.0 (CUDA 13.0)"


def program(folder: Path, prints: str, code: int = 0) -> Path:
    path = folder / "trainer"
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("launch", ["process", "bindings", "auto"])
def test_it_is_refused_before_anything_is_written(workspace: Workspace, launch: str) -> None:
    text = workspace.write_text()
    before = sorted(workspace.root.rglob("*"))
    run: tuple[str | Path, ...] = (*TINY_MODEL, "--input", text, "--experiment=job", "--device", ABSENT)
    process = workspace.orchestrate(*run, f"--launch={launch}").refused(2, ABSENT)
    assert len(process.err.splitlines()) == 1
    assert sorted(workspace.root.rglob("*")) == before


def test_blanks_around_an_override_do_not_count(workspace: Workspace) -> None:
    """The device decides which preset is the default, before the config is read."""
    assert Settings(override=[f" runtime.device = {ABSENT} "]).requested_device == ABSENT
    text = workspace.write_text()
    workspace.orchestrate("--input", text, "--override", f"runtime.device = {ABSENT}").refused(2, ABSENT)


def test_files_for_another_machine_are_written_without_it(workspace: Workspace) -> None:
    text = workspace.write_text()
    run: tuple[str | Path, ...] = (*TINY_MODEL, "--input", text, "--experiment=job", "--device", ABSENT)
    process = workspace.orchestrate("--input", text, "--device", ABSENT, "--launch=none")
    process.refused(2, ABSENT, "--preset NAME prepares a run for another machine")
    workspace.orchestrate("--input", text, "--device=gpu").refused(2, "given by --device")
    workspace.orchestrate(*run, "--launch=none").succeeded()
    workspace.orchestrate("tune", "--experiment=job", "space.yaml").refused(2)
    (workspace.root / "space.yaml").write_text("parameters: {optimizer.learning_rate: [1e-3, 1e-2]}")
    workspace.orchestrate("tune", "space.yaml", "--experiment=job").refused(2, ABSENT)
    assert [folder.name for folder in (workspace.root / "runs").iterdir()] == ["job"]


@pytest.mark.parametrize(
    ("prints", "code", "words"),
    [
        ("transformer-candle 0.1.0", 0, "built without CUDA, which `make cuda` adds"),
        (CUDA, 1, "does not start"),
        (CUDA, 0, "no NVIDIA driver"),
    ],
)
def test_the_program_that_trains_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, code: int, words: str
) -> None:
    def no_driver() -> list[_native.Gpu]:
        raise _native.ConfigError("no NVIDIA driver was found")

    monkeypatch.setattr(_native, "gpus", no_driver)
    monkeypatch.setattr(_native, "environment", lambda: {"cuda": "13.0"})
    trainer = program(tmp_path, prints, code)
    with pytest.raises((CommandError, _native.ConfigError), match=words) as refusal:
        gpus.require("cuda", trainer)
    assert "cuda" in str(refusal.value) or code
    for device in ("cpu", "auto"):
        gpus.require(device, trainer)


def test_a_program_with_cuda_trains_where_the_package_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "environment", lambda: {"cuda": None})
    gpus.require("cuda", program(tmp_path, CUDA))


def test_the_error_ends_with_the_code_for_a_wrong_request() -> None:
    with pytest.raises(_native.ConfigError) as refusal:
        gpus.require(ABSENT, None)
    assert refusal.value.exit_code == ExitCode.WRONG_REQUEST
