"""Where the file system has no locks, as some network file systems, a run has one owner all the same.

strace answers every `flock` with the error of such a file system.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from system_calls import require_strace
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace

LEASE = ".trainer.lease"
TRAIN = (TRAINER, "train", "--config", Path("runs", "job", "training.yaml"))


@pytest.fixture(autouse=True)
def strace() -> None:
    require_strace()


@pytest.fixture
def job(workspace: Workspace) -> Path:
    """A run that is prepared and not trained."""
    text = workspace.write_text()
    flags = ("--steps=100000", "--evaluate-every=100000", "--launch=none", f"--input={text}", "--experiment=job")
    workspace.orchestrate(*TINY_MODEL, *flags).succeeded()
    return workspace.run_folder("job")


def without_locks(*command: str | Path, error: str = "EOPNOTSUPP") -> list[str]:
    """Return the command on a file system without locks."""
    inject = ["-e", "trace=flock", "-e", f"inject=flock:error={error}", "-e", "signal=none", "-o", "/dev/null"]
    return ["strace", "-f", "-qq", *inject, "--", *map(str, command)]


def start_training(workspace: Workspace, *flags: str) -> subprocess.Popen[str]:
    """Start a trainer; return when it has taken a step."""
    process = workspace.start(*without_locks(*TRAIN, *flags))
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            return process
    raise AssertionError("".join(lines))


def trainer_id(job: Path) -> int:
    pid = json.loads((job / ".trainer.lock").read_text())["pid"]
    assert isinstance(pid, int)
    return pid


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_run_without_locks_has_one_trainer(workspace: Workspace, job: Path, error: str) -> None:
    first = start_training(workspace)
    pid = trainer_id(job)
    second = workspace.command(*without_locks(*TRAIN, "--resume", error=error))
    second.refused(2, f"is in use by process {pid}", "its own run directory")
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
    first.communicate(timeout=60)
    assert not (job / LEASE).exists()
    resumed = workspace.command(*without_locks(*TRAIN, "--resume", "--max-steps=1", error=error)).succeeded()
    assert "has no locks" in resumed.out
    assert not (job / LEASE).exists()


def test_a_killed_trainer_without_locks_is_not_waited_for(workspace: Workspace, job: Path) -> None:
    process = start_training(workspace, "--override", "runtime.checkpoint.every_n_steps=1")
    subprocess.run(["kill", "-KILL", str(trainer_id(job))], check=True)
    process.communicate(timeout=60)
    assert (job / LEASE).exists()
    resumed = workspace.command(*without_locks(*TRAIN, "--resume", "--max-steps=1")).succeeded()
    assert "waiting" not in resumed.err
    assert not (job / LEASE).exists()


def test_orchestrate_hands_the_lease_on_to_its_trainer(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = ("--steps=3", f"--input={text}", "--experiment=job")
    process = workspace.command(*without_locks(ORCHESTRATE, *TINY_MODEL, *flags)).succeeded()
    assert process.out.count("has no locks") == 1
    assert not (workspace.run_folder("job") / LEASE).exists()


def test_a_trainer_whose_run_was_taken_over_stops_without_saving(workspace: Workspace, job: Path) -> None:
    process = start_training(workspace, "--override", "runtime.checkpoint.every_n_steps=100000000")
    lease = job / LEASE
    owner = json.loads(lease.read_text())
    (other,) = owner["processes"]
    theirs = json.dumps(owner | {"token": "7", "host": "node7", "processes": [other | {"pid": 4242}]})
    staged = job / "theirs"
    staged.write_text(theirs)
    staged.replace(lease)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "process 4242 on node7 has taken" in output
    assert "panicked" not in output
    assert not (job / "checkpoints").exists() or not list((job / "checkpoints").glob("step-*"))
    assert lease.read_text() == theirs
    kinds = [json.loads(line)["kind"] for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert "end" not in kinds
