"""What a run records beside its losses: its machine, its samples, what holds it back, and why it ended."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from fake_hub import FakeHub
from orchestrator import RunConfig, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workspace import ORCHESTRATE, TINY_MODEL, Workspace

PROMPTS = ["def main", "# The *first*"]
SAMPLES = [
    f"--override=runtime.evaluation.prompts={json.dumps(PROMPTS)}",
    "--override=runtime.evaluation.prompt_tokens=8",
]


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Read the program's lines until one holds the word, and return that one."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if word in line:
            return line
    raise AssertionError(f"no line holds {word!r}:\n{output}")


def interrupt(process: subprocess.Popen[str]) -> None:
    """Stop a run as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out


def events_of(workspace: Workspace, experiment: str) -> EventAccumulator:
    events = EventAccumulator(str(workspace.run_folder(experiment) / "tensorboard"))
    events.Reload()
    return events


def last_line(workspace: Workspace, experiment: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((workspace.run_folder(experiment) / "metrics.jsonl").read_text().splitlines()[-1])
    return row


def test_a_run_records_what_it_takes_of_the_machine(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--experiment=machine", "--tensorboard", "--steps=100000"]
    process = workspace.start(ORCHESTRATE, *flags, "--override=runtime.utilization_every=1s")
    line = read_until(process, " cores ")
    assert line.startswith("step "), line
    interrupt(process)
    samples = workspace.metrics("machine", "utilization")
    assert samples
    for sample in samples:
        assert list(sample) == ["kind", "step", "time", "rss_bytes", "cpu_cores", "swap_bytes"]
        assert sample["rss_bytes"] > 1 << 20
        assert sample["cpu_cores"] > 0
    curves = events_of(workspace, "machine")
    assert [event.step for event in curves.Scalars("system/cpu_cores")] == [sample["step"] for sample in samples]
    reached = workspace.metrics("machine")[-1]["step"]
    assert last_line(workspace, "machine") == {"kind": "end", "step": reached, "reason": "stopped by SIGINT"}


def test_samples_are_on_the_screen_in_the_metrics_and_in_tensorboard(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=4", "--evaluate-every=2", "--tensorboard", *SAMPLES]
    process = workspace.orchestrate(*flags, "--experiment=samples").succeeded()
    samples = workspace.metrics("samples", "sample")
    assert [(row["step"], row["prompt"]) for row in samples] == [(step, text) for step in (2, 4) for text in PROMPTS]
    for prompt in PROMPTS:
        assert process.out.count(f"  | {prompt}") == 2, process.out
    events = events_of(workspace, "samples")
    for index, prompt in enumerate(PROMPTS):
        tag = f"sample/{index + 1}"
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
        tensorboard_texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]
        metrics_texts = [(row["step"], row["prompt"] + row["text"]) for row in samples if row["prompt"] == prompt]
        assert tensorboard_texts == [
            (step, "\n".join(f"    {line}" for line in text.split("\n"))) for step, text in metrics_texts
        ]


def test_a_stopped_run_resumes_with_the_samples_of_a_straight_one(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=8", "--evaluate-every=2", "--tensorboard", "--launch=none"]
    for experiment in ("straight", "resumed"):
        workspace.orchestrate(*flags, *SAMPLES, f"--experiment={experiment}").succeeded()
    configs = {name: workspace.run_folder(name) / "training.yaml" for name in ("straight", "resumed")}
    workspace.trainer("train", "--config", configs["straight"]).succeeded()
    workspace.trainer("train", "--config", configs["resumed"], "--max-steps=3").succeeded()
    assert last_line(workspace, "resumed")["kind"] == "end"
    workspace.trainer("train", "--config", configs["resumed"], "--resume").succeeded()
    for kind in ("evaluation", "sample", "end"):
        assert workspace.metrics("resumed", kind) == workspace.metrics("straight", kind)
    assert last_line(workspace, "resumed") == {"kind": "end", "step": 8, "reason": "all steps are done"}
    steps = [[event.step for event in events_of(workspace, name).Tensors("sample/1")] for name in configs]
    assert steps == [[2, 4, 6, 8]] * 2


def test_python_reads_samples_and_the_time_between_steps(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=3", *SAMPLES, "--launch=none", "--experiment=python"]
    workspace.orchestrate(*flags).succeeded()
    trainer = Trainer(RunConfig.load(workspace.run_folder("python") / "training.yaml"))
    first = next(trainer)
    assert (first.save_seconds, first.evaluation_seconds) == (0.0, 0.0)
    before = trainer.finished
    evaluation = trainer.evaluate()
    assert evaluation is not None
    assert [prompt for prompt, _ in evaluation.samples] == PROMPTS
    trainer.save()
    second = next(trainer)
    assert second.save_seconds > 0
    assert second.evaluation_seconds > 0
    (third,) = trainer
    assert (third.save_seconds, third.evaluation_seconds) == (0.0, 0.0)
    assert (before, trainer.finished) == (None, "all steps are done")
    assert trainer.take_advice() == []
    between = [(row["save_seconds"], row["evaluation_seconds"]) for row in workspace.metrics("python")]
    assert between == [(0.0, 0.0), (second.save_seconds, second.evaluation_seconds), (0.0, 0.0)]


def test_patience_ends_a_run_with_the_reason(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=100", "--evaluate-every=2", "--experiment=patience"]
    flags += ["--override=runtime.evaluation.patience=2", "--override=runtime.evaluation.min_delta=100"]
    process = workspace.orchestrate(*flags).succeeded()
    reason = "evaluation has not improved by at least 100 for 2 evaluations (best "
    assert reason in process.out
    end = last_line(workspace, "patience")
    assert end["kind"] == "end"
    assert end["reason"].startswith(reason)
    assert end["reason"].endswith(" at step 2)")
    assert "--resume --override runtime.evaluation.patience=null" in process.out
    assert workspace.checkpoints("patience")[-1] == "step-00000006"
    resumed_run = workspace.trainer("train", "--config", workspace.run_folder("patience") / "training.yaml", "--resume")
    assert reason in resumed_run.succeeded().out
    assert last_line(workspace, "patience") == end


@pytest.mark.slow
def test_a_slow_hub_is_named_as_what_holds_the_run_back(hub_workspace: Workspace, hub: FakeHub) -> None:
    flags = "--stream --max-samples=100 --steps=100000 --launch=none --experiment=slow".split()
    hub_workspace.orchestrate(*TINY_MODEL, *flags).succeeded()
    hub.latency = 1.0
    config = hub_workspace.run_folder("slow") / "training.yaml"
    # Without a cache on disk each epoch waits for the Hub again.
    overrides = ["data.cache_limit=1B", "runtime.evaluation.every_n_steps=null", "data.sequences_per_step=64"]
    words = [word for override in overrides for word in ("--override", override)]
    process = hub_workspace.start(ORCHESTRATE, "train", "--config", config, *words)
    line = read_until(process, "advice: ")
    assert "% of the time training waits for data: raise data.num_workers (it is " in line
    interrupt(process)
    (advice,) = hub_workspace.metrics("slow", "advice")
    assert f"advice: {advice['text']}\n" == line
