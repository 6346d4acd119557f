"""Small random models of each architecture, made by transformers, with tokenizers as such models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1, "vocab_size": 384,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama_2": {"model_type": "llama"},
    "tinyllama": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    "smollm_2": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama_3": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA_3, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "mistral_nemo": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen_2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": False},
    "qwen_2_tied": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen_3": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen_3_untied": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6},
}


def write_tokenizer(name: str, texts: list[str], folder: Path) -> None:
    """Write a tokenizer of the kind that this model has, trained on `texts`."""
    kind = "qwen_2" if name.startswith("qwen") else {"tinyllama": "llama_2"}.get(name, name)
    tiny_tokenizers.write(tiny_tokenizers.train(kind, texts, SIZES["vocab_size"]), kind, folder)


def make_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """Save a random model of transformers in several shards."""
    torch.manual_seed(7)
    settings = MODELS[name]
    config = AutoConfig.for_model(**{**SIZES, "bos_token_id": 0, "eos_token_id": 0, **settings, **sizes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder
