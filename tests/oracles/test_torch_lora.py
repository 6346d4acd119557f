"""The LoRA contender of the measurements on a GPU, in small on the CPU: adapters learn, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from torch_lora import LoraTrainer, read_lora_shape
from workspace import REPOSITORY

CONFIG = """
lora:
  rank: 4
data:
  sequence_length: 16
  batch_size: 2
  gradient_accumulation_steps: 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "training.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama_3", tmp_path / "model")


@pytest.mark.parametrize("recompute", [False, True])
def test_only_adapters_learn(model: Path, config: Path, recompute: bool) -> None:
    shape = read_lora_shape(model, config)
    assert (shape.sequence_length, shape.sequences_per_step) == (16, 4)
    trainer = LoraTrainer(model, shape, 4, torch.device("cpu"), "eager", recompute)
    assert {weight.dtype for weight in trainer.weights} == {torch.float32}, "as peft keeps them beside bf16"
    assert len(trainer.weights) == 2 * 7 * shape.num_layers
    losses = [trainer.step(2)[0] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_it_prints_its_speed(model: Path, config: Path) -> None:
    script = REPOSITORY / "benches" / "gpu" / "torch_lora.py"
    words = ["--model", str(model), "--config", str(config), "--mode", "eager", "--micro-batch", "4,2", "--steps", "2"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=hidden)
    assert process.returncode == 0, process.stderr
    row = json.loads(process.stdout.splitlines()[-1])
    assert (row["contender"], row["micro_batch"], row["steps"]) == ("peft-eager", 4, 2)
    assert row["tokens_per_second"] > 0
    assert "mfu" not in row, "the FLOPs are not those of LoRA"
