"""`runtime.deterministic_reduction`: any number of ranks gives the bits of one process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from test_ranks import MODEL, assert_same_state, checkpoint, copy_of, ranks_of, rows, started, train, until_step
from workspace import TRAINER, Workspace

MAX_GRAD_NORM = 0.5


@pytest.fixture
def template(workspace: Workspace) -> Path:
    """A prepared run of 8 sequences per step in 4 micro-batches, each of them a virtual shard, with clipping."""
    words = ("--override=runtime.deterministic_reduction=4", f"--override=optimizer.max_grad_norm={MAX_GRAD_NORM}")
    workspace.orchestrate(*MODEL, *words, "--input", workspace.write_text()).succeeded()
    return workspace.run_folder("template")


def numbers(config: Path) -> list[tuple[float, ...]]:
    """Return all numbers of a run's metrics but times."""
    steps = [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows(config)]
    return steps + [(row["step"], row["loss"], row["bits_per_byte"]) for row in rows(config, "evaluation")]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Compare weights as files, what the optimizer keeps, and the rest of the trainer's state."""
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert_same_state(one, other)
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (one, other)]
    assert states[0] == states[1]


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_two_and_four_ranks_give_the_same_bits(
    workspace: Workspace, template: Path, precision: str, algorithm: str
) -> None:
    words = (f"--override=runtime.precision={precision}", f"--override=optimizer.algorithm={algorithm}")
    alone = copy_of(template, "alone")
    train(workspace, alone, None, *words, "--override=runtime.threads=3").succeeded()
    assert min(row["grad_norm"] for row in rows(alone)) > MAX_GRAD_NORM, "every step clips"
    for ranks in (1, 2, 4):
        config = copy_of(template, f"{ranks}-ranks")
        train(workspace, config, ranks, *words).succeeded()
        assert numbers(config) == numbers(alone), ranks
        for step in (3, 6):
            assert_same_checkpoint(checkpoint(config, step), checkpoint(alone, step))


def test_without_the_key_ranks_round_differently(workspace: Workspace, template: Path) -> None:
    alone, config = copy_of(template, "alone"), copy_of(template, "shared")
    for run, ranks in ((alone, None), (config, 4)):
        train(workspace, run, ranks, "--override=runtime.deterministic_reduction=null").succeeded()
    assert numbers(config) != numbers(alone)
    assert numbers(config) == [pytest.approx(row, rel=1e-5) for row in numbers(alone)]


def test_steps_of_fewer_micro_batches_than_shards_agree(workspace: Workspace, template: Path) -> None:
    words = ("--override=scheduler.batch_warmup_start=2", "--override=scheduler.batch_warmup_steps=5")
    alone = copy_of(template, "alone")
    train(workspace, alone, None, *words).succeeded()
    assert rows(alone)[0]["tokens"] == 2 * 32
    for ranks in (2, 4):
        config = copy_of(template, f"{ranks}-ranks")
        train(workspace, config, ranks, *words).succeeded()
        assert numbers(config) == numbers(alone), ranks
        assert_same_checkpoint(checkpoint(config, 6), checkpoint(alone, 6))


def test_a_shard_of_several_micro_batches_is_summed_alike(workspace: Workspace, template: Path) -> None:
    words = ("--override=runtime.deterministic_reduction=2", "--override=data.batch_size=1")
    alone, config = copy_of(template, "alone"), copy_of(template, "shared")
    train(workspace, alone, None, *words).succeeded()
    train(workspace, config, 2, *words).succeeded()
    assert numbers(config) == numbers(alone)
    assert_same_checkpoint(checkpoint(config, 6), checkpoint(alone, 6))


def test_stages_and_packed_documents_agree(workspace: Workspace, template: Path) -> None:
    stages = (
        "stages:\n"
        "  - {steps: 3, sequence_length: 16, sequences_per_step: 16, batch_size: 4}\n"
        "  - {steps: 3, sequence_length: 32, sequences_per_step: 8, batch_size: 1}"
    )
    runs = [copy_of(template, name) for name in ("alone", "shared")]
    for config, ranks in zip(runs, (None, 2), strict=True):
        assert "\nstages: null" in config.read_text()
        config.write_text(config.read_text().replace("stages: null", stages))
        train(workspace, config, ranks, "--override=data.packing=documents").succeeded()
    assert numbers(runs[1]) == numbers(runs[0])
    assert_same_checkpoint(checkpoint(runs[1], 6), checkpoint(runs[0], 6))


def test_adapters_with_dropout_agree(workspace: Workspace, template: Path) -> None:
    base, alone, shared = (copy_of(template, name) for name in ("base", "alone", "shared"))
    train(workspace, base, None, "--max-steps=1").succeeded()
    keys = ("lora.rank=4", "lora.dropout=0.1", f"model.init_from={checkpoint(base, 1)}")
    for config, ranks in ((alone, None), (shared, 4)):
        train(workspace, config, ranks, *(f"--override={key}" for key in keys)).succeeded()
    assert numbers(shared) == numbers(alone)
    weights = [checkpoint(config, 6) / "adapter_model.safetensors" for config in (alone, shared)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_killed_run_continues_on_other_numbers_of_ranks(workspace: Workspace, template: Path) -> None:
    """The runs that are killed have more steps than they could take before the signal arrives."""
    words = ("runtime.precision=bf16", "runtime.checkpoint.every_n_steps=5", "scheduler.total_steps=5000")
    long = tuple(f"--override={word}" for word in words)
    straight, config = copy_of(template, "straight"), copy_of(template, "killed")
    alone = workspace.start(TRAINER, "train", f"--config={config}", *long)
    until_step(alone, 12)
    alone.kill()
    alone.communicate(timeout=60)
    first = int(rows(config)[-1]["step"])
    two = started(workspace, "orchestrate", "train", f"--config={config}", "--nproc=2", "--resume", *long)
    until_step(two, first + 15)
    for process in ranks_of(two).values():
        os.kill(process, signal.SIGKILL)
    two.communicate(timeout=60)
    last = int(rows(config)[-1]["step"]) + 10
    train(workspace, config, 4, "--resume", *long, f"--max-steps={last}").succeeded()
    train(workspace, straight, None, *long, f"--max-steps={last}").succeeded()
    assert numbers(config) == numbers(straight)
    assert_same_checkpoint(checkpoint(config, last), checkpoint(straight, last))


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (None, ["runtime.deterministic_reduction=3"], "is 3, which is not a power of two"),
        (2, ["runtime.deterministic_reduction=8"], "does not divide the 4 micro-batches of a step"),
        (2, ["data.batch_size=auto"], "data.batch_size is auto, which depends on the machine's memory"),
        (4, ["runtime.deterministic_reduction=2"], "4 ranks cannot share the 2 virtual shards"),
    ],
)
def test_what_shards_cannot_do_is_refused(
    workspace: Workspace, template: Path, ranks: int | None, words: list[str], message: str
) -> None:
    config = copy_of(template, "refused")
    process = train(workspace, config, ranks, *(f"--override={word}" for word in words)).refused(2, message)
    assert process.err.count("orchestrate: ") <= 1, process.err
    assert sorted(path.name for path in config.parent.iterdir()) == sorted(path.name for path in template.iterdir())


def test_the_plan_lists_the_partial_sums(workspace: Workspace, template: Path) -> None:
    def plan(shards: str, *words: str) -> dict[str, int]:
        key = f"--override=runtime.deterministic_reduction={shards}"
        process = workspace.orchestrate("plan", f"--config={template / 'training.yaml'}", "--json", key, *words)
        plan_json = json.loads(process.succeeded().out)
        assert plan_json.get("deterministic_reduction") == (None if shards == "null" else int(shards))
        sizes = {row["category"]: row["bytes"] for row in plan_json["bytes_by_category"]}
        return sizes | {"parameter bytes": 4 * plan_json["parameters"]}

    gpu = ("--gpu=rtx5090", "--override=model.head_dim=32")
    for ranks, buffers, device in ((1, 2, ()), (2, 1, ()), (4, 0, ()), (2, 1, gpu)):
        words = (*device, *(() if ranks == 1 else (f"--ranks={ranks}",)))
        grown, usual = plan("4", *words), plan("null", *words)
        extra = grown["gradients"] - usual["gradients"]
        assert extra == pytest.approx(buffers * usual["parameter bytes"], rel=0.01), ranks


def test_another_number_of_shards_needs_rebatch_to_resume(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "run")
    train(workspace, config, None, "--max-steps=3").succeeded()
    for value in ("2", "null"):
        change = f"--override=runtime.deterministic_reduction={value}"
        process = train(workspace, config, None, "--resume", change)
        process.refused(2, f"runtime.deterministic_reduction was 4 and is {value}", "--rebatch")
    resumed_run = train(workspace, config, 2, "--resume", "--rebatch", "--override=runtime.deterministic_reduction=2")
    resumed_run.succeeded()
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5, 6]
