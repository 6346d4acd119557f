"""Stopped by a signal or started again: nothing is lost, nothing is counted twice, every bit is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from fake_hub import FakeHub
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace


def weights(workspace: Workspace, experiment: str, step: int) -> bytes:
    run = workspace.run_folder(experiment)
    return (run / "checkpoints" / f"step-{step:08}" / "model.safetensors").read_bytes()


def tensorboard_steps(run: Path, tag: str) -> list[int]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    """Read the program's lines until one starts so."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(start):
            return
    raise AssertionError(f"no line starts with {start!r}:\n{output}")


@pytest.mark.parametrize("launch", ["process", "bindings"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_once_and_the_run_resumes(workspace: Workspace, launch: str, number: signal.Signals) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--checkpoint-every=100000", "--evaluate-every=100000"]
    process = workspace.start(ORCHESTRATE, *flags, "--steps=100000", f"--launch={launch}", "--experiment=stopped")
    wait_for_line(process, "step 5/")
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal's Ctrl-C reaches the whole group
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, out
    assert "Traceback" not in out
    (checkpoint_name,) = workspace.checkpoints("stopped")
    step = int(checkpoint_name.removeprefix("step-"))
    assert [row["step"] for row in workspace.metrics("stopped")] == list(range(1, step + 1))
    workspace.trainer(
        "train", "--config", workspace.run_folder("stopped") / "training.yaml", "--resume", "--max-steps", str(step + 3)
    ).succeeded()
    assert [row["step"] for row in workspace.metrics("stopped")] == list(range(1, step + 4))


def test_a_run_that_waits_for_the_network_ends_at_once(hub_workspace: Workspace, hub: FakeHub) -> None:
    flags = "--stream --max-samples=300 --steps=100 --launch=none --experiment=waits".split()
    hub_workspace.orchestrate(*TINY_MODEL, *flags).succeeded()
    hub.faults.add("/cdn/", "stall", count=1000)
    config = hub_workspace.run_folder("waits") / "training.yaml"
    evaluation = ("--override", "runtime.evaluation.every_n_steps=null")
    process = hub_workspace.start(TRAINER, "train", "--config", config, *evaluation)
    wait_for_line(process, "training ")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130, out
    assert hub_workspace.checkpoints("waits") == ["step-00000000"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_are_five_and_resume_and_five(workspace: Workspace, precision: str) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=10", "--checkpoint-every=5", "--evaluate-every=5"]
    flags += [f"--precision={precision}", "--launch=none", "--tensorboard"]
    for experiment in ("straight", "resumed"):
        workspace.orchestrate(*flags, f"--experiment={experiment}").succeeded()
    configs = {name: workspace.run_folder(name) / "training.yaml" for name in ("straight", "resumed")}
    workspace.trainer("train", "--config", configs["straight"]).succeeded()
    # Run past the checkpoint, so that what was logged after it must be taken back.
    workspace.trainer("train", "--config", configs["resumed"], "--max-steps", "8").succeeded()
    checkpoints = workspace.run_folder("resumed") / "checkpoints"
    workspace.trainer("train", "--config", configs["resumed"], "--resume", checkpoints / "step-00000005").succeeded()

    assert weights(workspace, "resumed", 10) == weights(workspace, "straight", 10)
    assert workspace.losses("resumed") == workspace.losses("straight")
    assert [row["step"] for row in workspace.metrics("resumed")] == list(range(1, 11))
    loss_rows = [(row["step"], row["loss"]) for row in workspace.metrics("resumed", "evaluation")]
    assert loss_rows == [(row["step"], row["loss"]) for row in workspace.metrics("straight", "evaluation")]
    for experiment in ("straight", "resumed"):
        assert tensorboard_steps(workspace.run_folder(experiment), "loss/train") == list(range(1, 11))


def test_tensorboard_reads_every_series_we_write(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(
        *TINY_MODEL, "--input", text, "--steps=4", "--evaluate-every=2", "--experiment=board", "--tensorboard"
    ).succeeded()
    events = EventAccumulator(str(workspace.run_folder("board") / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    expected = "loss/train loss/validation learning_rate gradient_norm tokens_per_second memory_bytes"
    assert tags >= set(expected.split())
    logged = [row["loss"] for row in workspace.metrics("board")]
    assert [event.value for event in events.Scalars("loss/train")] == pytest.approx(logged, rel=1e-6)


def test_a_corrupted_checkpoint_is_named_and_skipped(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=6", "--checkpoint-every=3", "--experiment=hurt"]
    workspace.orchestrate(*flags).succeeded()
    run = workspace.run_folder("hurt")
    path = run / "checkpoints" / "step-00000006" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = weights(workspace, "hurt", 3)
    process = workspace.trainer("train", "--config", run / "training.yaml", "--resume").succeeded()
    assert "step-00000006" in process.err + process.out
    assert weights(workspace, "hurt", 3) == before
    for name in ("step-00000003", "step-00000006"):
        (run / "checkpoints" / name / "trainer_state.json").write_text("{}")
    workspace.trainer("train", "--config", run / "training.yaml", "--resume").refused(5, "step-00000006")


def test_a_rewind_removes_no_checkpoint_before_it_saves(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--steps=6", "--launch=none", f"--input={text}", "--experiment=job").succeeded()
    folder = workspace.run_folder("job") / "checkpoints"
    # Without an evaluation none is kept as the best.
    overrides = ["checkpoint.every_n_steps=2", "checkpoint.max_keep=2", "evaluation.every_n_steps=null"]
    keys = [word for override in overrides for word in ("--override", f"runtime.{override}")]
    train: list[str | Path] = [TRAINER, "train", "--config", workspace.run_folder("job") / "training.yaml", *keys]
    workspace.command(*train, "--max-steps=6").succeeded()
    assert workspace.checkpoints("job") == ["step-00000004", "step-00000006"]
    rewind: list[str | Path] = ["--resume", folder / "step-00000004"]
    workspace.command(*train, *rewind, "--max-steps=4").succeeded()
    assert (folder / "latest").readlink().name == "step-00000004"
    assert workspace.checkpoints("job") == ["step-00000004", "step-00000006"]
    resumed = workspace.command(*train, "--resume", "--max-steps=5").succeeded()
    assert "resuming at step 4" in resumed.out
    assert workspace.checkpoints("job") == ["step-00000004", "step-00000005"]


def test_a_second_trainer_is_refused_with_the_owners_process(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=100000", "--launch=process", "--experiment=locked"]
    first = workspace.start(ORCHESTRATE, *flags)
    wait_for_line(first, "step 1/")
    config = workspace.run_folder("locked") / "training.yaml"
    second = workspace.trainer("train", "--config", config)
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=120)
    second.refused(2, "process", "locked")


def test_what_may_not_change_on_resume_is_named(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=4", "--experiment=changed").succeeded()
    config = workspace.run_folder("changed") / "training.yaml"
    resume = ("train", "--config", config, "--resume", "--override")
    workspace.trainer(*resume, "data.sequence_length=16").refused(2, "data.sequence_length")
    workspace.trainer(*resume, "model.num_layers=3").refused(2, "model.num_layers")


def test_what_a_stopped_and_resumed_run_was_trained_on_is_proven(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=10", "--launch=none"]
    workspace.orchestrate(*flags, "--experiment=proven").succeeded()
    run = workspace.run_folder("proven")
    config = ("--config", run / "training.yaml")
    workspace.trainer("train", *config, "--max-steps=5").succeeded()
    workspace.trainer("train", *config, "--resume").succeeded()
    validate = ("validate-data", run, "--replay=1", "--replay=10", "--json")
    report = json.loads(workspace.orchestrate(*validate).succeeded().out)
    assert (report["steps"], report["replayed"], report["problems"]) == (10, [1, 10], [])
    assert report == json.loads(workspace.trainer(*validate).succeeded().out)
    assert "10 steps" in workspace.orchestrate("validate-data", run).succeeded().out
    workspace.orchestrate("validate-data", run, "--replay=11").refused(2, "step 11", "1 to 10")

    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"targets":128', '"targets":127', 1))
    workspace.orchestrate("validate-data", run).refused(3, "ledger.jsonl")
    workspace.orchestrate("validate-data", "nowhere").refused(
        2, str(workspace.root / "nowhere"), "no file or directory"
    )
