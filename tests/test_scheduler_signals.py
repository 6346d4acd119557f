"""What schedulers and machines do to a job: warnings before its end, limits of time, a launcher that is killed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from test_held_back import stand_in
from test_metrics import interrupt, read_until
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace

LONG = [*TINY_MODEL, "--steps=1000000", "--checkpoint-every=1000000", "--evaluate-every=1000000", "--no-tensorboard"]
LAUNCHES = ["trainer", "process", "bindings"]


def start(workspace: Workspace, launch: str, *flags: str) -> subprocess.Popen[str]:
    """Start a long run: by the trainer alone, by `orchestrate`, or in its process; return once it has taken steps."""
    text = workspace.write_text()
    run = [*LONG, "--input", str(text), "--experiment=job", *flags]
    if launch == "trainer":
        workspace.orchestrate(*run, "--launch=none").succeeded()
        process = workspace.start(TRAINER, "train", "--config", workspace.run_folder("job") / "training.yaml")
    else:
        process = workspace.start(ORCHESTRATE, *run, f"--launch={launch}")
    read_until(process, "step 3/")
    return process


@pytest.mark.parametrize(
    ("launch", "number"), [*((launch, signal.SIGUSR1) for launch in LAUNCHES), ("trainer", signal.SIGUSR2)]
)
def test_a_warning_saves_and_training_continues(workspace: Workspace, launch: str, number: signal.Signals) -> None:
    process = start(workspace, launch)
    process.send_signal(number)
    message = read_until(process, f"{number.name}: saving step ")
    assert "training continues" in message
    read_until(process, "checkpoint")
    checkpoint_names = workspace.checkpoints("job")
    assert len(checkpoint_names) == 1
    read_until(process, "step ")
    interrupt(process)
    assert workspace.checkpoints("job")[0] == checkpoint_names[0], "the last one is saved beside it"


@pytest.mark.parametrize("launch", LAUNCHES[1:])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_a_closed_terminal_and_spent_cpu_time_save_the_run(
    workspace: Workspace, launch: str, number: signal.Signals
) -> None:
    process = start(workspace, launch)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert f"{number.name}: saving step" in out
    assert workspace.checkpoints("job")


def test_a_warning_while_the_tokenizer_is_trained_ends_nothing(workspace: Workspace) -> None:
    text = workspace.write_text()
    run = [*TINY_MODEL, "--input", str(text), "--experiment=job", "--steps=3"]
    process = workspace.start(ORCHESTRATE, *run)
    read_until(process, "okenizer")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out


def test_a_trainer_saves_and_ends_with_its_launcher(workspace: Workspace) -> None:
    process = start(workspace, "process")
    process.kill()
    # The trainer has the pipe too, so that it ends when the trainer does.
    out, _ = process.communicate(timeout=120)
    assert "SIGTERM: saving step " in out
    assert workspace.checkpoints("job")
    step = int(workspace.checkpoints("job")[-1].removeprefix("step-"))
    workspace.orchestrate("--experiment=job", "--resume", f"--steps={step + 2}").succeeded()


def last_record(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text().splitlines()[-1]


@pytest.mark.parametrize("launch", LAUNCHES[1:])
def test_a_time_limit_ends_a_run_saved(workspace: Workspace, launch: str) -> None:
    later = {"LD_PRELOAD": str(stand_in(workspace.root)), "CLOCK_AHEAD": "7000"}
    workspace = Workspace(workspace.root, later)
    process = start(workspace, launch, "--time-limit=1h 50min")
    (workspace.root / "jump").touch()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "the time limit (--time-limit): saving step " in out
    assert "Stopped and saved" in out and "--resume" in out
    assert workspace.checkpoints("job")
    assert "stopped by the time limit" in last_record(workspace.run_folder("job"))


def test_a_time_limit_that_leaves_no_time_is_told(workspace: Workspace) -> None:
    text = workspace.write_text()
    run = [*TINY_MODEL, f"--input={text}", "--experiment=job", "--steps=3"]
    workspace.orchestrate(*run, "--time-limit=1s").refused(1, "the time limit", "give it more")
    workspace.orchestrate(*run, "--time-limit=soon").refused(2, "--time-limit soon", "11h50m")
