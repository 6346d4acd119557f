"""Runs of tiny models: what they are, how the trainer is started, what it leaves behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cuda_emulator.library import Emulator
from safetensors.numpy import load_file
from workspace import REPOSITORY, TARGET, Finished, Workspace

EMULATED_TRAINER = TARGET / "cuda-emulated" / "debug" / "transformer-candle"
TOKENIZER = REPOSITORY / "transformer_candle" / "dataset" / "tests" / "fixtures" / "tokenizer.json"


@dataclass(frozen=True)
class Tiny:
    """A model and its data, small enough for Triton's interpreter."""

    hidden: int = 64
    heads: int = 2
    kv_heads: int = 1
    intermediate: int = 96
    layers: int = 1
    sequence: int = 16
    batch: int = 1
    accumulation: int = 2
    precision: str = "bf16"
    steps: int = 4
    checkpoint_every: int = 2
    seed: int = 7
    packing: str = "concat"
    algorithm: str = "adamw"
    init_from: Path | None = None
    lora: Mapping[str, Any] | None = None
    architecture: str = "llama"
    head_dim: int | None = None

    def config(self, text: Path) -> dict[str, Any]:
        """Return a config that `train` loads."""
        sizes = {
            "architecture": self.architecture,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 64,
            # Large enough for attention to prefer one token to another from the first step on.
            "init_std": 0.1,
        }
        return {
            "model": {"init_from": str(self.init_from)} if self.init_from else sizes,
            "lora": dict(self.lora or {}),
            "tokenizer": {"tokenizer_json": str(TOKENIZER)},
            "data": {
                "train_shards": [str(text)],
                "validation_shards": [str(text)],
                "sequence_length": self.sequence,
                "packing": self.packing,
                "batch_size": self.batch,
                "gradient_accumulation_steps": self.accumulation,
                "shuffle_buffer_size": 16,
            },
            "optimizer": {"learning_rate": 3e-3, "algorithm": self.algorithm},
            "scheduler": {"strategy": "cosine", "warmup_steps": 1, "total_steps": self.steps},
            "runtime": {
                "seed": self.seed,
                "precision": self.precision,
                "log_every_n_steps": 1,
                "checkpoint": {"every_n_steps": self.checkpoint_every},
                "evaluation": {"every_n_steps": self.checkpoint_every, "max_batches": 1},
            },
        }


@dataclass(frozen=True)
class Runs:
    """Runs below one folder, each in a folder of its own."""

    workspace: Workspace
    emulator: Emulator

    @property
    def text(self) -> Path:
        """The text that a run trains and evaluates on: one long document."""
        return self.workspace.root / "book.txt"

    @property
    def lines(self) -> Path:
        """The lines of `text`, each a document: the text of runs that keep documents apart."""
        return self.workspace.root / "lines.jsonl"

    def having(self, **settings: Any) -> Runs:
        """Return the runs of the same folder with another GPU."""
        return replace(self, emulator=self.emulator.having(**settings))

    def program(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Finished:
        """Run the trainer with the emulated GPU."""
        return self._with(environment).command(EMULATED_TRAINER, *arguments)

    def start(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return self._with(environment).start(EMULATED_TRAINER, *arguments)

    def write(self, name: str, tiny: Tiny) -> Path:
        """Write the config of a run; return its folder."""
        if not self.text.exists():
            book = self.workspace.write_text(self.text.name, 40_000).read_text(encoding="utf-8")
            documents = [json.dumps({"text": line}) for line in book.splitlines() if line]
            self.lines.write_text("\n".join(documents))
        folder = self.workspace.run_folder(name)
        folder.mkdir(parents=True)
        text = self.lines if tiny.packing == "documents" else self.text
        (folder / "training.json").write_text(json.dumps(tiny.config(text)))
        return folder

    def train(
        self, name: str, *arguments: str | Path, device: str = "cuda", environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Train a run that was written, or resume it."""
        config = self.workspace.run_folder(name) / "training.json"
        words = ("train", "--config", config, "--device", device, *arguments)
        return self.program(*words, environment=environment)

    def trained(self, name: str, tiny: Tiny, device: str = "cuda") -> str:
        """Train a run to its end; return its name."""
        self.write(name, tiny)
        self.train(name, device=device).succeeded()
        return name

    def metrics(self, name: str, kind: str = "train") -> list[dict[str, Any]]:
        return self.workspace.metrics(name, kind)

    def steps(self, name: str) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm as they were logged."""
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self.metrics(name)]

    def state(self, name: str, step: int) -> dict[str, bytes]:
        """Return the bytes of the weights and the optimizer's state in a checkpoint."""
        folder = self.workspace.run_folder(name) / "checkpoints" / f"step-{step:08}"
        return {file: (folder / file).read_bytes() for file in ("model.safetensors", "optimizer.safetensors")}

    def trainer_state(self, name: str, step: int) -> dict[str, Any]:
        """Return the `trainer_state.json` of a checkpoint."""
        state: dict[str, Any] = json.loads((self.checkpoint(name, step) / "trainer_state.json").read_text())
        return state

    def gradients(self, name: str) -> dict[str, np.ndarray]:
        """Return first moments or momentum after step 1, which are its clipped gradients times a constant."""
        file = self.checkpoint(name, 1) / "optimizer.safetensors"
        return {key: value for key, value in load_file(file).items() if key.endswith((".first_moment", ".momentum"))}

    def checkpoint(self, name: str, step: int) -> Path:
        return self.workspace.run_folder(name) / "checkpoints" / f"step-{step:08}"

    def _with(self, environment: Mapping[str, str] | None) -> Workspace:
        # A real CUDA of the caller's must not stand in for a library that is missing here.
        nowhere = dict.fromkeys(
            ("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "ORCHESTRATE_NVIDIA_WHEELS"), ""
        )
        nowhere["HOME"] = str(self.workspace.root)
        own = nowhere | self.emulator.environment() | dict(environment or {})
        return Workspace(self.workspace.root, {**self.workspace.extra_environment, **own})
