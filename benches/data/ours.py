"""Batches from this project's stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from orchestrator import RunConfig, TokenStream
from setting import Setting

MODEL = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_attention_heads": 1}
"""A model for the config, which must have one; nothing computes with it."""
STEPS = 1_000_000
"""More steps than any task takes, so that the stream does not end."""


@dataclass
class Ours:
    """Batches from `orchestrator.TokenStream` at its default settings. `encoder` names a tokenizer of the material."""

    setting: Setting
    encoder: str = "tokenizer.json"

    def batches(self, state: Any = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self.stream = TokenStream(RunConfig.load(config(self.setting, self.encoder)), state=state)
        return iter(self.stream)

    def state(self) -> Any:
        return self.stream.state()


def config(setting: Setting, encoder: str = "tokenizer.json") -> Path:
    """Write a run's files, as `orchestrate` does, and return the config's path."""
    folder = setting.scratch
    folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {
        "sequence_length": setting.sequence_length,
        "sequences_per_step": setting.sequences,
        "batch_size": setting.sequences,
        "shuffle_buffer_size": setting.shuffle_buffer_size,
        "num_workers": setting.workers,
        "cache_dir": str(folder / "blocks"),
        # Text to evaluate on, so that nothing is held out of what is measured.
        "validation_shards": [str(setting.files()[0])],
    }
    if setting.hub:
        streaming = {"dataset": setting.hub, "split": "train", "max_samples": None, "stream_batch_size": 1}
        (folder / "streaming_config.json").write_text(json.dumps({**streaming, "experiment": "bench"}))
    else:
        data["train_shards"] = [str(path) for path in setting.files()]
    values = {
        "model": MODEL | {"max_position_embeddings": setting.sequence_length},
        "tokenizer": {"tokenizer_json": str(setting.root / "tokenizer" / encoder)},
        "data": data,
        "scheduler": {"total_steps": STEPS},
        "runtime": {"seed": setting.seed},
    }
    path = folder / "training.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
