"""Adapters as peft writes them with every kind of setting: the same logits as peft's, or a refusal by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub.fineweb import documents
from orchestrator import _native, exported_model, hf_directory
from orchestrator.model_source import Source
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from test_adapter_export import TOKENS, load, logits
from tiny_models import make_model, write_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_rslora": {"init_lora_weights": "pissa", "use_rslora": True, "lora_alpha": 3},
    "pissa_of_wide_layers": {"init_lora_weights": "pissa", "target_modules": ["down_proj", "up_proj", "k_proj"]},
    "olora": {"init_lora_weights": "olora", "lora_alpha": 6},
    "mica": {"init_lora_weights": "mica"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "patterns": {
        "rank_pattern": {r"layers\.[01]\.self_attn\.q_proj": 2, "v_proj": 6},
        "alpha_pattern": {"^model.layers.1.*v_proj": 24, "q_proj": 1},
    },
    "patterns_and_pissa": {"init_lora_weights": "pissa", "rank_pattern": {"v_proj": 2}, "use_rslora": True},
    "expression": {"target_modules": r".*layers\.(0|2)\..*(q|down)_proj"},
    "every_linear_layer_but_some": {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*|.*up_proj"},
    "excluded_names": {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    "full_names": {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.2.mlp.up_proj"]},
    "one_layer": {"layers_to_transform": 0},
    "layers": {"layers_to_transform": [1, 2], "layers_pattern": "layers"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("llama_2", tmp_path_factory.mktemp("peft") / "base")
    write_tokenizer("llama_2", list(documents())[:50], folder)
    return folder


def saved(base: Path, folder: Path, **settings: Any) -> Path:
    """Save adapters of peft that have moved from where they began."""
    torch.manual_seed(3)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})
    model = get_peft_model(load(base), config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_exported_adapters_compute_what_peft_computes(base: Path, tmp_path: Path, kind: str) -> None:
    folder = saved(base, tmp_path / "adapters", **KINDS[kind])
    expected = logits(PeftModel.from_pretrained(load(base), folder))
    assert np.abs(logits(load(base)) - expected).max() > 1e-2, "the adapters do something"

    merged_folder = tmp_path / "merged"
    hf_directory.write(exported_model.open_merged(Source(folder, None)), merged_folder, "5GB")
    np.testing.assert_allclose(logits(load(merged_folder)), expected, atol=1e-4)
    alone = tmp_path / "alone"
    hf_directory.write(exported_model.open_adapters_alone(Source(folder, None)), alone, "5GB")
    np.testing.assert_allclose(
        logits(AutoPeftModelForCausalLM.from_pretrained(alone, dtype=torch.float32)), expected, atol=1e-4
    )
    np.testing.assert_allclose(orchestrator.logits(alone, TOKENS, device="cpu"), expected, atol=1e-4)


READ = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules",
    "use_rslora", "bias", "init_lora_weights",
}  # fmt: skip
WORKED_IN = {"exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"}
WITHOUT_EFFECT = {
    "auto_mapping", "peft_version", "revision", "inference_mode", "fan_in_fan_out", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "modules_to_save": ["lm_head"], "megatron_config": {"a": 1}, "trainable_token_indices": [3], "use_dora": True,
    "velora_config": {"num_groups": 64}, "alora_invocation_tokens": [5], "use_qalora": True,
    "monteclora_config": {"num_samples": 8}, "layer_replication": [[0, 2], [1, 3]], "lora_bias": True,
    "target_parameters": ["mlp.weight"], "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
}  # fmt: skip


def test_every_key_of_the_installed_peft_is_known() -> None:
    keys = {field.name for field in dataclasses.fields(LoraConfig)}
    assert keys == READ | WORKED_IN | WITHOUT_EFFECT | REFUSED.keys()


def test_defaults_of_peft_are_accepted_and_other_values_refused(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapters")
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    _native.check_adapter_config(file, config)
    for key, value in {**REFUSED, "bias": "all", "task_type": "SEQ_CLS", "init_lora_weights": "corda"}.items():
        with pytest.raises(orchestrator.ConfigError, match=key):
            _native.check_adapter_config(file, config | {key: value})
        file.write_text(json.dumps(config | {key: value, "rank_pattern": {"nothing": 2}}))
        with pytest.raises(orchestrator.ConfigError, match=key):
            exported_model.open_merged(Source(folder, None))
