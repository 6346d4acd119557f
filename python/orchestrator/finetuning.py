"""`orchestrate finetune`: the pipeline with the defaults of supervised fine-tuning on conversations."""

from __future__ import annotations

import datetime
import json
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from orchestrator.command_error import CommandError
from orchestrator.input_files import read_text
from orchestrator.options import parameter
from orchestrator.screen import step
from orchestrator.settings import RUN, TOKENIZER, TRAINING, Settings, flag_parameters, from_flags

ABOUT = """Fine-tune a pretrained model on conversations.

Rows have `messages`, or `prompt` and `completion`, as trl's SFTTrainer reads them. The loss counts what the assistant
says."""

LEFT_OUT = {
    "stream", "preset", "config", "init_from", "text_column", "data_format", "hidden_size", "intermediate_size",
    "layers", "heads", "kv_heads",
}  # fmt: skip
"""Flags of the pipeline that fine-tuning decides, or that a pretrained model does."""

BASE_PRESET = "smoke_cpu"
SEQUENCE_LENGTH = 1024
"""Tokens of a sequence, unless the model takes fewer: trl's `max_length`."""
SEQUENCES_PER_STEP = 16
LEARNING_RATE, ADAPTER_LEARNING_RATE = "2e-5", "2e-4"
"""trl's for all weights, and ten times that, as its documentation says of adapters."""
WARMUP_STEPS = 10


def parameters() -> list[Parameter]:
    """Return the options of the command: its own, and those of the pipeline that it leaves open."""
    model = Option(
        metavar="DIR|OWNER/NAME[@REVISION]",
        help="The model to start from: a folder in Hugging Face's format, or a repository of the Hub.",
        rich_help_panel=RUN,
    )
    epochs = Option(
        metavar="N",
        min=1,
        help="Passes over the conversations, at a constant learning rate. Default: 1, unless --steps is given.",
        rich_help_panel=TRAINING,
    )
    own = [parameter("model", Annotated[str | None, model]), parameter("epochs", Annotated[int | None, epochs])]
    return own + [option for option in flag_parameters() if not _is_left_out(option)]


def _is_left_out(option: Parameter) -> bool:
    panel = option.annotation.__metadata__[0].rich_help_panel
    return option.name in LEFT_OUT or panel == TOKENIZER


def settings(model: str | None, epochs: int | None, **flags: Any) -> Settings:
    """Return the settings of the pipeline for what was typed, and print the defaults that they start from."""
    from orchestrator import pretrained

    chosen = from_flags(flags)
    if chosen.resume is not None:
        given = [flag for flag, value in {"--model": model, "--epochs": epochs}.items() if value is not None]
        if given:
            raise CommandError(f"--resume continues a run as it was started: leave out {' and '.join(given)}")
        return chosen
    if model is None:
        raise CommandError("say what to fine-tune: --model DIR, or --model OWNER/NAME of the Hugging Face Hub")
    if chosen.dataset is None and not chosen.input:
        raise CommandError("say what to train on: --dataset OWNER/NAME of the Hub, or --input FILE")
    if epochs is not None and "steps" in chosen.keys:
        raise CommandError("--epochs and --steps both say how long to train: give one of them")
    folder = pretrained.locate(model)
    chosen.keys["init_from"] = str(folder)
    chosen.preset = BASE_PRESET
    defaults = _defaults(chosen, folder, epochs)
    chosen.defaults = [f"{key}={value}" for key, value in defaults.items()]
    _show(defaults, chosen)
    return chosen


def _defaults(chosen: Settings, folder: Path, epochs: int | None) -> dict[str, str]:
    """Return the config keys that differ from the preset's, and their values."""
    keys = {
        "data.format": "chat",
        "data.packing": "documents",
        "data.chat_template_date": datetime.datetime.now().astimezone().date().isoformat(),
        "data.sequence_length": str(_sequence_length(folder)),
        "data.batch_size": "null",
        "data.gradient_accumulation_steps": "null",
        "data.sequences_per_step": str(SEQUENCES_PER_STEP),
        "optimizer.learning_rate": ADAPTER_LEARNING_RATE if _adapter_rank(chosen) else LEARNING_RATE,
        "optimizer.weight_decay": "0.0",
        "scheduler.warmup_steps": str(WARMUP_STEPS),
        "scheduler.min_lr": "0.0",
        "runtime.activation_recompute": "null",
        "runtime.log_every_n_steps": "1",
    }
    if {"batch_size", "grad_accum"} <= chosen.keys.keys():
        keys["data.sequences_per_step"] = "null"
    if "steps" in chosen.keys:
        warmup = min(WARMUP_STEPS, int(chosen.keys["steps"]) // 10)
        return keys | {"scheduler.strategy": "cosine", "scheduler.warmup_steps": str(warmup)}
    return keys | {
        "scheduler.strategy": "constant",
        "scheduler.total_steps": "null",
        "scheduler.total_epochs": str(epochs or 1),
    }


def _adapter_rank(chosen: Settings) -> str | None:
    """Return the rank of the adapters that train beside the model; none where all of its weights train."""
    typed = dict(override.split("=", 1) for override in chosen.config_overrides() if "=" in override)
    rank = typed.get("lora.rank", "null").strip()
    return None if rank == "null" else rank


def _sequence_length(folder: Path) -> int:
    """Return the default length of a sequence: as much of it as the model takes."""
    try:
        longest = json.loads(read_text(folder / "config.json")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        longest = None  # the trainer says what is wrong with the file
    return min(SEQUENCE_LENGTH, longest) if isinstance(longest, int) else SEQUENCE_LENGTH


def _show(defaults: dict[str, str], chosen: Settings) -> None:
    """Print what the run is trained with, as far as no flag says otherwise."""
    typed = dict(override.split("=", 1) for override in chosen.config_overrides() if "=" in override)
    values = defaults | typed
    if "scheduler.total_steps" in typed:
        length = f"{typed['scheduler.total_steps']} steps"
    else:
        length = f"{values['scheduler.total_epochs']} epochs" if "scheduler.total_epochs" in values else "1 epoch"
    rank = _adapter_rank(chosen)
    trained = f"adapters of rank {rank}" if rank else "all weights"
    step(
        "fine-tune",
        f"{trained}, learning rate {values['optimizer.learning_rate']} ({values['scheduler.strategy']} after "
        f"{values['scheduler.warmup_steps']} steps of warm-up), {length.replace('1 epochs', '1 epoch')}, sequences of "
        f"{values['data.sequence_length']} tokens, packing {values['data.packing']}",
    )
