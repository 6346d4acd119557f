"""Closed or full outputs never stop training; output that was asked for is written, or its loss is reported."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Finished, Workspace

PROGRAMS = {"orchestrate": ORCHESTRATE, "transformer-candle": TRAINER}


def shell(workspace: Workspace, command: str, *arguments: str | Path) -> Finished:
    """Run a line of bash in which "$@" stands for the arguments; its exit code is the first program's."""
    line = f"{command}; exit ${{PIPESTATUS[0]}}"
    return workspace.command("bash", "-c", line, "bash", *arguments)


@pytest.fixture(scope="module")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    text = workspace.write_text(characters=40_000)
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=4", "--experiment=talk").succeeded()
    return workspace


@pytest.mark.parametrize("launch", ["process", "bindings"])
def test_a_run_says_at_its_start_what_shows_it(workspace: Workspace, launch: str) -> None:
    flags = [*TINY_MODEL, "--steps=4", "--tensorboard", f"--launch={launch}", "--experiment=seen"]
    out = workspace.orchestrate(*flags, "--input", workspace.write_text()).succeeded().out
    pattern = r"^`(.*) watch runs/seen` shows this run, `tensorboard --logdir runs/seen/tensorboard` its curves$"
    (program,) = re.findall(pattern, out, re.MULTILINE)
    assert "ended" in workspace.command(*shlex.split(program), "watch", "runs/seen", "--once").succeeded().out


@pytest.mark.parametrize("launch", ["process", "bindings"])
@pytest.mark.parametrize(
    "display",
    ['"$@" | head -1', '"$@" >&-', '"$@" >/dev/full', '"$@" >&- 2>&- <&-', '"$@" >/dev/full 2>/dev/full'],
)
def test_training_outlives_its_display(workspace: Workspace, display: str, launch: str) -> None:
    text = workspace.write_text(characters=40_000)
    flags: list[str | Path] = [*TINY_MODEL, "--input", text, "--steps=4", "--experiment=unseen", f"--launch={launch}"]
    process = shell(workspace, display, ORCHESTRATE, *flags).succeeded()
    assert process.err == ""
    assert workspace.checkpoints("unseen") == ["step-00000004"]
    assert len(workspace.losses("unseen")) == 4


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_refusal_keeps_its_exit_code_without_stderr(workspace: Workspace, program: Path) -> None:
    for display in ('"$@" 2>&-', '"$@" 2>/dev/full', '"$@" >/dev/full 2>&-'):
        assert shell(workspace, display, program, "plan", "--config", "nowhere.yaml").code == 2


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--config", "runs/talk/training.yaml"],
        ["plan", "--config", "runs/talk/training.yaml", "--json"],
        ["generate", "--experiment=talk", "--prompt=def", "--max-tokens=4"],
        ["generate", "--experiment=talk", "--prompt=def", "--max-tokens=4", "--json"],
        ["evaluate", "--experiment=talk"],
        ["evaluate", "--experiment=talk", "--json"],
        ["validate-data", "runs/talk"],
    ],
    ids=" ".join,
)
def test_what_was_asked_for_is_delivered_or_missed(
    trained_workspace: Workspace, program: Path, command: list[str]
) -> None:
    full = shell(trained_workspace, '"$@" >/dev/full', program, *command).refused(
        1, "stdout", "No space left on device"
    )
    assert len(full.err.splitlines()) == 1
    closed = shell(trained_workspace, '"$@" | true', program, *command).succeeded()
    assert closed.err == ""


def test_a_closed_pipe_does_not_hide_a_verdict(trained_workspace: Workspace) -> None:
    copy = trained_workspace.root / "copied"
    shutil.copytree(trained_workspace.run_folder("talk") / "checkpoints" / "step-00000004", copy / "step-00000004")
    shutil.copytree(copy / "step-00000004", copy / "step-00000005")
    (copy / "step-00000005" / "config.json").write_text("{}")
    assert shell(trained_workspace, '"$@" | true', TRAINER, "checkpoint", "verify", "copied").code == 5
    assert shell(trained_workspace, '"$@" | true', ORCHESTRATE, "doctor", "--device=foo").code == 2


def test_an_encoding_without_the_character_ends_nothing(trained_workspace: Workspace) -> None:
    ascii_only = Workspace(trained_workspace.root, {"PYTHONIOENCODING": "ascii"})
    ask = ["generate", "--experiment=talk", "--prompt=é", "--max-tokens=4"]
    assert ascii_only.orchestrate(*ask).succeeded().out.startswith("\\xe9")
    assert json.loads(ascii_only.orchestrate(*ask, "--json").succeeded().out)["prompt"] == "é"
    ascii_only.orchestrate("evaluate", "--experiment=é").refused(2, "experiment")


def test_a_long_prompt_is_refused_before_it_is_printed(trained_workspace: Workspace) -> None:
    for program in PROGRAMS.values():
        ask = ["generate", "--experiment=talk", "--prompt", "def main " * 200]
        assert trained_workspace.command(program, *ask).refused(2, "do not fit into a context").out == ""


def test_both_programs_take_at_least_one_token_and_step(trained_workspace: Workspace) -> None:
    for program in PROGRAMS.values():
        ask = ["generate", "--experiment=talk", "--prompt=x", "--max-tokens=0"]
        trained_workspace.command(program, *ask).refused(2, "--max-tokens")
        train = ["train", "--config=runs/talk/training.yaml", "--resume", "--max-steps=0"]
        trained_workspace.command(program, *train).refused(2, "--max-steps")
