"""Every spelling of a config.json that transformers takes: the same logits, or a refusal that names the key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub.fineweb import documents
from tiny_models import make_model, write_tokenizer
from transformers import AutoModelForCausalLM

TOKENS = list(range(5, 69))
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in SCALED.items() if name != key}


ABSENT = object()
"""A key that the config.json leaves out."""
UNSCALED: dict[str, Any] = {"rope_scaling": ABSENT, "rope_parameters": ABSENT, "rope_theta": 5000.0}
SPELLINGS: dict[str, dict[str, Any]] = {
    "both-type-keys": {**UNSCALED, "rope_scaling": {**SCALED, "type": "llama3"}},
    "type-alone": {**UNSCALED, "rope_scaling": {**without("rope_type"), "type": "llama3"}},
    "theta-inside-scaling": {**UNSCALED, "rope_scaling": {**SCALED, "rope_theta": 700.0}},
    "scaling-before-parameters": {"rope_scaling": SCALED, "rope_parameters": DEFAULT, "rope_theta": 300.0},
    "empty-scaling": {"rope_scaling": {}, "rope_parameters": {**SCALED, "rope_theta": 300.0}},
    "null-scaling": {**UNSCALED, "rope_scaling": None},
    "default-scaling": {**UNSCALED, "rope_scaling": {"type": "default"}},
    "dynamic-scaling": {**UNSCALED, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "linear-factor-1": {**UNSCALED, "rope_scaling": {"type": "linear", "factor": 1.0}},
    "no-theta": {"rope_scaling": ABSENT, "rope_parameters": ABSENT},
    "no-original-length": {**UNSCALED, "rope_scaling": without("original_max_position_embeddings")},
    "swish": {"hidden_act": "swish"},
    "null-head-dim": {"head_dim": None},
    "no-activation": {"hidden_act": ABSENT},
    "no-epsilon": {"rms_norm_eps": ABSENT},
    "dtype-and-torch-dtype": {"dtype": None, "torch_dtype": "float32"},
    "unknown-keys": {"pretraining_tp": 1, "unsloth_version": "x", "rope_interleaved": False, "attention_dropout": 0.0},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "window": {"sliding_window": 64},
    "window-in-use": {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
    "window-of-no-layer": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    "window-of-listed-layers": {
        "sliding_window": 64, "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip
MODELS = {"llama": "llama_2", "mistral": "mistral", "qwen2": "qwen_2", "qwen3": "qwen_3_untied"}
REFUSED = {
    ("attention-bias", "llama"): "attention_bias",
    ("attention-bias", "qwen3"): "attention_bias",
    ("mlp-bias", "llama"): "mlp_bias",
    ("window-of-listed-layers", "llama"): "layer_types",
    ("window-of-no-layer", "mistral"): "do not fit into a context of 8",
}
"""What transformers computes with and the decoder does not have, and what the refusal says."""

UNREADABLE = {("null-head-dim", "qwen2"), ("null-head-dim", "qwen3")}
"""What transformers cannot read either."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {kind: make_model(name, root / kind) for kind, name in MODELS.items()}
    for kind, folder in folders.items():
        write_tokenizer(MODELS[kind], list(documents())[:20], folder)
    return folders


def respelled(model: Path, folder: Path, keys: dict[str, Any]) -> Path:
    shutil.copytree(model, folder)
    config = {**json.loads((folder / "config.json").read_text()), **keys}
    remaining = {key: value for key, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(remaining))
    return folder


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [(spelling, kind) for spelling in SPELLINGS for kind in MODELS if (spelling, kind) not in UNREADABLE],
)
def test_a_spelling_computes_as_in_transformers(
    models: dict[str, Path], spelling: str, kind: str, tmp_path: Path
) -> None:
    folder = respelled(models[kind], tmp_path / "model", SPELLINGS[spelling])
    if (key := REFUSED.get((spelling, kind))) is not None:
        with pytest.raises(orchestrator.TrainerError, match=key):
            orchestrator.logits(folder, TOKENS, device="cpu")
        return
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(orchestrator.logits(folder, TOKENS, device="cpu"), expected, atol=1e-4)
