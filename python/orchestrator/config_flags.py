"""The flags of `orchestrate` that set a config key."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.help_text import DATA, MODEL, OFTEN, RUN, TRAINING
from orchestrator.options import ConfigFlag

CONFIG_FLAGS = (
    ConfigFlag("text_column", "data.text_column", DATA),
    ConfigFlag("shuffle_buffer", "data.shuffle_buffer_size", DATA),
    ConfigFlag("data_format", "data.format", DATA),
    ConfigFlag("chat_template", "data.chat_template", DATA),
    ConfigFlag("packing", "data.packing", DATA),
    ConfigFlag("loader_workers", "data.num_workers", DATA),
    ConfigFlag("init_from", "model.init_from", MODEL),
    ConfigFlag("hidden_size", "model.hidden_size", MODEL),
    ConfigFlag("intermediate_size", "model.intermediate_size", MODEL),
    ConfigFlag("layers", "model.num_layers", MODEL),
    ConfigFlag("heads", "model.num_attention_heads", MODEL),
    ConfigFlag("kv_heads", "model.num_key_value_heads", MODEL),
    ConfigFlag("seq_len", "data.sequence_length", MODEL),
    ConfigFlag("lora_rank", "lora.rank", MODEL),
    ConfigFlag("lora_alpha", "lora.alpha", MODEL),
    ConfigFlag("lora_init_from", "lora.init_from", MODEL),
    ConfigFlag("batch_size", "data.batch_size", TRAINING),
    ConfigFlag("grad_accum", "data.gradient_accumulation_steps", TRAINING),
    ConfigFlag("steps", "scheduler.total_steps", TRAINING),
    ConfigFlag("learning_rate", "optimizer.learning_rate", TRAINING),
    ConfigFlag("weight_decay", "optimizer.weight_decay", TRAINING),
    ConfigFlag("warmup_steps", "scheduler.warmup_steps", TRAINING),
    ConfigFlag("schedule", "scheduler.strategy", TRAINING),
    ConfigFlag("precision", "runtime.precision", TRAINING),
    ConfigFlag("seed", "runtime.seed", TRAINING),
    ConfigFlag("checkpoint_every", "runtime.checkpoint.every_n_steps", OFTEN),
    ConfigFlag("max_checkpoints", "runtime.checkpoint.max_keep", OFTEN),
    ConfigFlag("evaluate_every", "runtime.evaluation.every_n_steps", OFTEN),
    ConfigFlag("eval_batches", "runtime.evaluation.max_batches", OFTEN),
    ConfigFlag("log_every", "runtime.log_every_n_steps", OFTEN),
    ConfigFlag("tensorboard", "runtime.logging.tensorboard", OFTEN),
    ConfigFlag("device", "runtime.device", RUN),
)
"""The flags that set a config key: name, key and panel of the help text."""


def values_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of overrides, `key=value`, without the blanks around either: of a key its last one."""
    parts = (override.partition("=") for override in overrides)
    return {key.strip(): value.strip() for key, sign, value in parts if sign}
