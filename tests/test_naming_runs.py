"""A run is named the same way in every command: by its experiment, its directory, a checkpoint, a config, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from orchestrator import _native, cli
from workspace import TINY_MODEL, Finished, Workspace

ASK = ["--prompt=def", "--max-tokens=2", "--temperature=0"]
NEWEST = "using the newest run, {}"


@pytest.fixture(scope="module")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with the runs `first`, and `second`, which is newer. Tests leave them as they are."""
    workspace = Workspace(tmp_path_factory.mktemp("runs"))
    workspace.write_text()
    for name in ("first", "second"):
        flags = ["--input=book.txt", "--steps=2", "--warmup-steps=0", f"--experiment={name}"]
        workspace.orchestrate(*TINY_MODEL, *flags).succeeded()
    return workspace


Here = Callable[..., Finished]


@pytest.fixture
def here(trained_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Run `orchestrate` in this process, in the folder of the trained runs."""
    monkeypatch.chdir(trained_workspace.root)

    def run(*words: str) -> Finished:
        capfd.readouterr()
        code = cli._run(list(words))
        return Finished(code, *capfd.readouterr())

    return run


def names_of(workspace: Workspace, run: str) -> list[str]:
    """Return the ways to name a run."""
    folder = workspace.run_folder(run)
    checkpoints = folder / "checkpoints"
    return [
        run, f"runs/{run}", str(folder), str(checkpoints), str(checkpoints / "step-00000002"),
        str(checkpoints / "latest"), f"{run}/checkpoints/latest", str(folder / "training.yaml"),
    ]  # fmt: skip


def test_a_model_is_found_by_every_name_of_its_run(trained_workspace: Workspace) -> None:
    expected = trained_workspace.trainer("generate", "--experiment=first", *ASK).succeeded().out
    for name in names_of(trained_workspace, "first"):
        assert trained_workspace.trainer("generate", name, *ASK).succeeded().out == expected, name
        assert "2 steps" in trained_workspace.trainer("validate-data", name).succeeded().out


def test_a_config_is_found_by_every_name_of_its_run(trained_workspace: Workspace, here: Here) -> None:
    folder = trained_workspace.run_folder("first").resolve()
    for name in names_of(trained_workspace, "first"):
        assert _native.config_of_run(name).resolve() == folder / "training.yaml"
        assert _native.run_directory(name).resolve() == folder
    assert here("plan", "first").code == here("plan", "--config=runs/first/training.yaml").code == 0


@pytest.mark.parametrize(
    "command",
    [
        ["generate", *ASK],
        ["evaluate"],
        ["plan"],
        ["bench", "--steps=1", "--seconds=1"],
        ["validate-data"],
        ["watch", "--once"],
        ["export", "--format=hf", "--out=exported"],
    ],
    ids=lambda command: command[0],
)
def test_the_newest_run_is_taken_and_named(trained_workspace: Workspace, here: Here, command: list[str]) -> None:
    assert NEWEST.format(trained_workspace.run_folder("second")) in here(*command).succeeded().err
    name, *rest = command
    rest = ["--out=exported-by-name" if word.startswith("--out") else word for word in rest]
    assert "newest" not in here(name, "first", *rest).succeeded().err


def test_a_command_that_cannot_use_the_run_says_so(trained_workspace: Workspace, here: Here) -> None:
    trained_workspace.trainer("train", "first").refused(2, "--resume", "first")
    trained_workspace.trainer("train").refused(2, NEWEST.format(trained_workspace.run_folder("second")))
    here("chat", "first", "--once=hi").refused(2, "chat template")
    assert trained_workspace.trainer("checkpoint", "list", "first").succeeded().out.count("latest") == 1


def test_a_missing_run_is_told_with_the_newest_ones(here: Here) -> None:
    space = Path("space.yaml")
    space.write_text("parameters: {optimizer.learning_rate: [1.0e-3, 2.0e-3]}\n")
    with_run: list[list[str]] = [
        ["watch"], ["plan"], ["validate-data"], ["generate", *ASK], ["evaluate"], ["export"], ["chat", "--once=x"],
        ["bench"], ["push", "alice/tiny"],
    ]  # fmt: skip
    for words in with_run:
        position = 2 if words[0] == "push" else 1
        process = here(*words[:position], "third", *words[position:]).refused(2, "third", "no file or directory")
        assert "the newest runs are: second, first" in process.err, words
    here("plan", "smoke_cpu").refused(2, "--preset smoke_cpu")


def test_a_run_in_place_of_a_command_is_told_from_one(trained_workspace: Workspace, here: Here) -> None:
    for run in ("first", "runs/first"):
        here(run, "--resume").refused(2, f"{run} is a run: `orchestrate --resume {run}`")
    here("third", "--resume").refused(2, "there is no command third")


def test_two_names_at_once_are_refused(here: Here) -> None:
    flags = {"generate": ["--experiment=first", *ASK], "plan": ["--config=x.yaml"], "export": ["--checkpoint=x"]}
    for command, arguments in flags.items():
        here(command, "second", *arguments).refused(2)


def test_runs_are_listed_newest_first(trained_workspace: Workspace, here: Here) -> None:
    heading, second, first = here("runs").succeeded().out.splitlines()
    assert heading.split() == ["run", "state", "step", "loss", "held-out", "size", "age"]
    assert second.split()[:5] == ["second", "finished", "2", "of", "2"]
    assert first.startswith("first ")
    rows = [json.loads(line) for line in here("runs", "--json").succeeded().out.splitlines()]
    assert [row["run"] for row in rows] == ["second", "first"]
    assert rows[0]["loss"] == trained_workspace.losses("second")[-1]
    assert (
        rows[0]["bytes"]
        > (trained_workspace.run_folder("second") / "checkpoints/latest/model.safetensors").stat().st_size
    )


def test_without_any_run_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["runs"]) == 0
    assert cli._run(["generate", *ASK]) == 2
    captured = capfd.readouterr()
    assert "there are no runs in" in captured.out
    assert "there is no run in" in captured.err


def test_a_resume_takes_the_run_by_name(trained_workspace: Workspace, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    trained_workspace.command("cp", "-a", trained_workspace.root / "runs", tmp_path / "runs").succeeded()
    more = ["--override", "scheduler.total_steps=3"]
    workspace.trainer("train", "first", "--resume", *more).succeeded()
    workspace.trainer("train", "--resume", "runs/second/checkpoints/latest", *more).succeeded()
    for run in ("first", "second"):
        assert [row["step"] for row in workspace.metrics(run)] == [1, 2, 3]
        assert str((workspace.run_folder(run) / "checkpoints" / "latest").readlink()) == "step-00000003"
    # Its config still says 2 steps.
    assert "ends at step 2" in workspace.trainer("train", "first", "--resume").succeeded().out
    assert "3 of 3" in workspace.orchestrate("runs").succeeded().out


def test_a_text_file_of_an_earlier_version_is_followed(trained_workspace: Workspace, tmp_path: Path) -> None:
    trained_workspace.command("cp", "-a", trained_workspace.root / "runs", tmp_path / "runs").succeeded()
    workspace = Workspace(tmp_path)
    latest = workspace.run_folder("first") / "checkpoints" / "latest"
    latest.unlink()
    latest.write_text("step-00000002\n")
    for arguments in (["first/checkpoints/latest"], ["--checkpoint", latest]):
        workspace.trainer("generate", *arguments, *ASK).succeeded()
