"""The PyTorch contender of the measurements on a card, in small on the CPU: it trains the model it is said to train."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from workspace import REPOSITORY, TRAINER

sys.path.insert(0, str(REPOSITORY / "benches" / "gpu"))

from torch_llama import Shape, Trainer, plain_yaml, read_shape

PRESETS = sorted((REPOSITORY / "configs").glob("*.yaml"))
TINY = Shape(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_embeddings=True, rope_theta=1e4, norm_epsilon=1e-5, sequence_length=32, sequences_per_step=8,
)  # fmt: skip


def trainer(shape: Shape = TINY, recompute: bool = False) -> Trainer:
    return Trainer(shape, torch.device("cpu"), compiled=False, recompute=recompute, attention="flash")


@pytest.mark.parametrize("config", [path for path in PRESETS if "rtx5090" in path.stem], ids=lambda path: path.stem)
def test_it_counts_the_flops_that_the_trainer_counts(config: Path) -> None:
    plan = subprocess.run([TRAINER, "plan", "--config", config, "--json"], capture_output=True, check=True)
    assert read_shape(config).flops_per_token() == json.loads(plan.stdout)["flops_per_token"]


@pytest.mark.parametrize("config", PRESETS, ids=lambda path: path.stem)
def test_without_pyyaml_it_reads_the_same_from_every_preset(config: Path) -> None:
    assert plain_yaml(config.read_text()) == yaml.safe_load(config.read_text())


def test_the_micro_batch_and_recomputing_change_only_the_rounding() -> None:
    whole = trainer().step(8)
    assert whole[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02)
    for other in (trainer().step(1), trainer(recompute=True).step(4)):
        assert other == pytest.approx(whole, rel=2e-3)


def test_it_learns_one_batch_by_heart() -> None:
    contender = trainer()
    losses = [contender.step(4)[0] for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    for weight, master in zip(contender.weights, contender.masters, strict=True):
        assert torch.equal(weight, master.bfloat16())


def test_the_command_ends_with_its_result(tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    model = {name: value for name, value in vars(TINY).items() if name not in ("sequence_length", "sequences_per_step")}
    data = {"sequence_length": TINY.sequence_length, "sequences_per_step": TINY.sequences_per_step}
    config.write_text(json.dumps({"model": model, "data": data}))
    command = [
        sys.executable,
        REPOSITORY / "benches/gpu/torch_llama.py",
        "--config",
        config,
        "--mode",
        "eager",
        "--steps",
        "1",
    ]
    # Hides a card, so that the test is the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["micro_batch"] for line in lines[:-1]] == [1, 2, 4, 8]
    assert lines[-1]["contender"] == "torch-eager"
    assert lines[-1]["tokens_per_step"] == 256
    assert lines[-1]["mfu"] is None
