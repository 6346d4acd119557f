"""The sizes of a Llama and of its optimizer step, read from a config of ours. Needs no PyTorch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_embeddings: bool
    rope_theta: float
    norm_epsilon: float
    sequence_length: int
    sequences_per_step: int

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def flops_per_token(self) -> float:
        """Return 6 per weight that takes part in a matmul and 6 L A T for causal attention, forward and backward."""
        packed = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_size
        block = (packed + self.hidden_size + 3 * self.intermediate_size) * self.hidden_size
        matmul_weights = self.num_layers * block + self.vocab_size * self.hidden_size
        return 6.0 * matmul_weights + 6.0 * self.num_layers * self.hidden_size * self.sequence_length


def read_shape(path: Path) -> Shape:
    """Return the shape of a config in YAML or JSON."""
    text = path.read_text(encoding="utf-8")
    config = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    if "vocab_size" not in config["model"]:
        sys.exit(f"{path} leaves model.vocab_size to the tokenizer, which is not read here: set it")
    return shape_of(config["model"], config["data"])


def shape_of(model: dict[str, Any], data: dict[str, Any]) -> Shape:
    fields = {name: model[name] for name in Shape.__dataclass_fields__ if name in model}
    defaults = {"tie_embeddings": True, "rope_theta": 1e4, "norm_epsilon": 1e-5}
    sequences = data.get("sequences_per_step") or data["batch_size"] * data["gradient_accumulation_steps"]
    return Shape(**{**defaults, **fields}, sequence_length=data["sequence_length"], sequences_per_step=sequences)


def read_yaml(text: str) -> dict[str, Any]:
    """Return the values of a config: by PyYAML if installed, else as `key: value` lines nested by indentation."""
    try:
        import yaml
    except ImportError:
        return plain_yaml(text)
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def plain_yaml(text: str) -> dict[str, Any]:
    root: dict[str, Any] = {}
    open_levels = [(-1, root)]
    for line in text.splitlines():
        content = line.split("#", 1)[0].rstrip()
        if not content:
            continue
        indent = len(content) - len(content.lstrip())
        key, _, value = content.strip().partition(":")
        while open_levels[-1][0] >= indent:
            open_levels.pop()
        into = open_levels[-1][1]
        into[key] = scalar(value.strip()) if value.strip() else {}
        if not value.strip():
            open_levels.append((indent, into[key]))
    return root


def scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None}.get(text, text)
