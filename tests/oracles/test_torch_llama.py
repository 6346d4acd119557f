"""The PyTorch contender of the measurements on a GPU, in small on the CPU: it trains the model it is said to train."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import orchestrator
import pytest
import torch
import yaml
from peer import load_checkpoint
from torch_llama import Shape, Trainer, plain_yaml, read_shape, shape_of
from workspace import REPOSITORY, TINY_MODEL, TRAINER, Workspace

PRESETS = sorted((REPOSITORY / "configs").glob("*.yaml"))
TINY = Shape(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_embeddings=True, rope_theta=1e4, norm_epsilon=1e-5, sequence_length=32, sequences_per_step=8,
)  # fmt: skip


# What torch_llama.py trains with, and initial weights so large that decay shows, whose gradients are about as long as
# they may be before they are clipped.
PEER_SETTINGS = (
    "--launch=none --steps=4 --learning-rate=3e-4 --weight-decay=0.1 --schedule=constant --warmup-steps=0 "
    "--override=optimizer.algorithm=adamw --override=optimizer.beta1=0.9 --override=optimizer.beta2=0.95 "
    "--override=optimizer.epsilon=1e-8 --override=optimizer.max_grad_norm=1.0 --override=model.init_std=0.05 "
    "--override=model.architecture=llama"
).split()


def trainer(shape: Shape = TINY, recompute: bool = False, dtype: torch.dtype = torch.bfloat16) -> Trainer:
    return Trainer(shape, torch.device("cpu"), compiled=False, recompute=recompute, attention="flash", dtype=dtype)


@pytest.mark.parametrize("config", [path for path in PRESETS if "rtx5090" in path.stem], ids=lambda path: path.stem)
def test_it_counts_the_flops_that_the_trainer_counts(config: Path) -> None:
    plan = subprocess.run([TRAINER, "plan", "--config", config, "--json"], capture_output=True, check=True)
    assert read_shape(config).flops_per_token() == json.loads(plan.stdout)["flops_per_token"]


@pytest.mark.parametrize("config", PRESETS, ids=lambda path: path.stem)
def test_without_pyyaml_it_reads_the_same_from_every_preset(config: Path) -> None:
    assert plain_yaml(config.read_text()) == yaml.safe_load(config.read_text())


def test_micro_batch_and_recompute_change_only_rounding() -> None:
    whole = trainer().step(8)
    assert whole[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02)
    for other in (trainer().step(1), trainer(recompute=True).step(4)):
        assert other == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_in_fp32_it_takes_the_very_steps_that_the_trainer_takes(workspace: Workspace, tied: bool) -> None:
    flags = [*TINY_MODEL, *PEER_SETTINGS, f"--override=model.tie_embeddings={str(tied).lower()}"]
    workspace.orchestrate(*flags, "--input", workspace.write_text(), "--experiment=same").succeeded()
    config = orchestrator.RunConfig.load(workspace.run_folder("same") / "training.yaml")
    ours = orchestrator.Trainer(config)
    start = load_checkpoint(Path(ours.save()))

    values = config.to_dict()
    theirs = trainer(shape_of(values["model"], values["data"]), dtype=torch.float32)
    theirs.load(start)
    norms = []
    for report, (inputs, targets) in zip(ours, orchestrator.TokenStream(config), strict=False):
        theirs.tokens = torch.stack([torch.from_numpy(inputs), torch.from_numpy(targets)]).long()
        assert (report.loss, report.grad_norm) == pytest.approx(theirs.step(2), rel=1e-5)
        norms.append(report.grad_norm)
    assert len(norms) == 4
    assert min(norms) < 1.0 < max(norms), "clipping takes part, and changes what AdamW does"

    end = load_checkpoint(Path(ours.save()))
    assert sorted(theirs.names) == sorted(end)
    for name, master in zip(theirs.names, theirs.masters, strict=True):
        assert (master - end[name]).norm() < 2e-3 * (end[name] - start[name]).norm(), name


def test_it_learns_one_batch_by_heart() -> None:
    contender = trainer()
    losses = [contender.step(4)[0] for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    for weight, master in zip(contender.weights, contender.masters, strict=True):
        assert torch.equal(weight, master.bfloat16())


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run torch_llama.py on the CPU."""
    config = folder / "tiny.json"
    model = {name: value for name, value in vars(TINY).items() if name not in ("sequence_length", "sequences_per_step")}
    data = {"sequence_length": TINY.sequence_length, "sequences_per_step": TINY.sequences_per_step}
    config.write_text(json.dumps({"model": model, "data": data}))
    words = [sys.executable, REPOSITORY / "benches/gpu/torch_llama.py", "--config", config, "--mode", "eager", *options]
    # Hides a GPU, so that the test is the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)


def test_the_command_ends_with_its_result(tmp_path: Path) -> None:
    process = command(tmp_path, "--steps", "1")
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert [line["micro_batch"] for line in lines[:-1]] == [1, 2, 4, 8]
    assert lines[-1]["contender"] == "torch-eager"
    assert lines[-1]["tokens_per_step"] == 256
    assert lines[-1]["mfu"] is None


def test_a_budget_bounds_the_steps_and_the_peak_is_given(tmp_path: Path) -> None:
    process = command(tmp_path, "--micro-batch", "8", "--steps", "100000000", "--seconds", "1", "--peak", "1e12")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert 1 <= result["steps"] < 100_000_000
    assert result["mfu"] == result["model_flops_per_second"] / 1e12


def test_a_gpu_that_is_asked_for_and_missing_is_refused(tmp_path: Path) -> None:
    process = command(tmp_path, "--device", "cuda")
    assert process.returncode == 2
    assert "finds no CUDA device" in process.stderr
