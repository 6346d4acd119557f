"""The examples for Slurm and SkyPilot: two processes lose their machine and end with the same weights."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from slurm_stand_in import Job
from test_ranks import MODEL, assert_same_state, checkpoint, copy_of, rows, template, train, until_step
from workspace import REPOSITORY, Workspace

__all__ = ["template"]
EXAMPLES = REPOSITORY / "examples"
STEPS = 300
LENGTH = (f"--override=scheduler.total_steps={STEPS}", "--override=runtime.evaluation.every_n_steps=null")


@pytest.fixture
def straight_run(workspace: Workspace, template: Path) -> Path:
    """A run in two processes that nothing has disturbed."""
    config = copy_of(template, "straight")
    train(workspace, config, 2, *LENGTH).succeeded()
    return config


def batch_script(workspace: Workspace, job: Job, restarts: int) -> subprocess.Popen[str]:
    path = workspace.environment["PATH"]
    workspace.extra_environment = job.environment(path, restarts) | {"PROCESSES_PER_NODE": "1"}
    process = workspace.start("bash", job.script, *job.arguments)
    workspace.extra_environment = {}
    return process


@pytest.mark.parametrize("asked_by", [signal.SIGUSR1, signal.SIGTERM])
def test_a_slurm_job_saves_and_continues(
    workspace: Workspace, template: Path, straight_run: Path, asked_by: signal.Signals
) -> None:
    config = copy_of(template, "preempted")
    job = Job.submit(EXAMPLES / "slurm.sbatch", [str(config), *LENGTH], workspace.root / "slurm")
    assert job.options.requeue
    process = batch_script(workspace, job, restarts=0)
    output = until_step(process, 5)
    assert "in 2 ranks" in output
    os.kill(process.pid, asked_by)
    output += process.communicate(timeout=120)[0]
    last_step = int(rows(config)[-1]["step"])
    assert 5 <= last_step < STEPS
    assert checkpoint(config, last_step).exists(), output
    if asked_by == signal.SIGTERM:
        assert (process.returncode, job.requeued()) == (1, []), output
        return
    assert (process.returncode, job.requeued()) == (0, [str(job.number)]), output
    process = batch_script(workspace, job, restarts=1)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert f"resuming at step {last_step}" in output
    assert len(job.requeued()) == 1
    assert [row["step"] for row in rows(config)] == list(range(1, STEPS + 1))
    assert_same_state(checkpoint(config, STEPS), checkpoint(straight_run, STEPS))


def vanish(marker: str) -> None:
    """End every process that has this in its environment, as the loss of its machine does."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue


def test_a_skypilot_job_continues_on_another_instance(workspace: Workspace) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    options = [flag for flag in MODEL if not flag.startswith(("--launch", "--experiment", "--steps", "--checkpoint"))]
    bucket = workspace.root / "bucket"
    environment = task["envs"] | {
        "EXPERIMENT": "run", "DATASET": "demo", "DEVICE": "cpu", "BUCKET": str(bucket), "COPY_SECONDS": "0.1",
        "OPTIONS": " ".join([*options, f"--steps={STEPS}", "--checkpoint-every=10"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "2", "TEST_INSTANCE": str(workspace.root),
    }  # fmt: skip
    workspace.extra_environment = environment
    process = workspace.start("bash", "-c", task["run"])
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step ") and any(bucket.glob("run/checkpoints/*/MANIFEST.json")):
            break
    vanish(f"TEST_INSTANCE={workspace.root}")
    output += process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGKILL, output
    last_step = int(workspace.metrics("run")[-1]["step"])
    assert last_step < STEPS
    shutil.rmtree(workspace.root / "runs")
    shutil.rmtree(workspace.root / "artifacts")

    second_instance = workspace.command("bash", "-c", task["run"]).succeeded()
    assert "resuming at step" in second_instance.out
    config = workspace.run_folder("run") / "training.yaml"
    assert [row["step"] for row in rows(config)] == list(range(1, STEPS + 1))
    workspace.orchestrate("validate-data", config.parent).succeeded()
    bucket_config = bucket / "run" / "training.yaml"
    assert_same_state(checkpoint(bucket_config, STEPS), checkpoint(config, STEPS))
    assert workspace.checkpoints("run") == sorted(
        path.name for path in (bucket_config.parent / "checkpoints").glob("step-*")
    )

    workspace.extra_environment = environment | {"EXPERIMENT": "straight"}
    workspace.command("bash", "-c", task["run"]).succeeded()
    straight_run = workspace.run_folder("straight") / "training.yaml"
    assert_same_state(checkpoint(config, STEPS), checkpoint(straight_run, STEPS))


def test_skypilot_accepts_the_example(workspace: Workspace) -> None:
    python = REPOSITORY / ".venv-skypilot" / "bin" / "python"
    if not python.exists():
        pytest.skip("`make check-examples` installs SkyPilot")
    workspace.extra_environment["HOME"] = str(workspace.root)
    script = (
        "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); [machine] = task.resources; "
        "print(machine.use_spot, machine.accelerators, machine.job_recovery, list(task.storage_mounts))"
    )
    example = EXAMPLES / "skypilot.yaml"
    accepted = workspace.command(python, "-c", script, example).succeeded()
    assert "True {'H100': 8}" in accepted.out
    assert "EAGER_NEXT_REGION" in accepted.out
    assert "/bucket" in accepted.out
    broken = workspace.root / "broken.yaml"
    broken.write_text(example.read_text().replace("use_spot:", "use_spots:"))
    assert workspace.command(python, "-c", script, broken).code != 0
