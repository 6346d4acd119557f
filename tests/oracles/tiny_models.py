"""Small random models of each architecture, made by transformers, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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
    "llama_2_tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama_3": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA_3, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen_2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": False},
    "qwen_3": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
}


def write_tokenizer(text: Path, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


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
