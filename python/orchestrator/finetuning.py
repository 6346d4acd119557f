"""`orchestrate finetune`: the pipeline with the defaults of supervised fine-tuning on conversations."""

from __future__ import annotations

import datetime
from copy import copy
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from orchestrator import pipeline_options
from orchestrator.command_error import CommandError
from orchestrator.config_flags import values_of
from orchestrator.help_text import RUN, TOKENIZER, TRAINING
from orchestrator.input_files import json_object
from orchestrator.options import panel_option, parameter
from orchestrator.paths import shown
from orchestrator.screen import counted, step
from orchestrator.settings import OpenKeys, Settings

ABOUT = """Fine-tune a pretrained model on conversations.

Rows have `messages`, or `prompt` and `completion`, as trl's SFTTrainer reads them. The loss counts what the assistant
says."""

LEFT_OUT = {
    "stream", "preset", "depth", "config", "init_from", "text_column", "data_format", "hidden_size",
    "intermediate_size", "layers", "heads", "kv_heads",
}  # fmt: skip
"""Flags of the pipeline that `finetune` does not take: fine-tuning or the pretrained model decides them."""

OWN_HELP = {
    "dataset": "A data set of conversations of the Hugging Face Hub.",
    "max_samples": "Use only the first N conversations in each epoch. Default: all.",
}
"""Help texts of options whose defaults differ from the pipeline's."""

BASE_PRESET = "smoke_cpu"
MODEL_FLAG = "--model"
SEQUENCE_LENGTH = 1024
"""Default sequence length in tokens, unless the model's maximum is lower: trl's `max_length`."""
LEARNING_RATE, ADAPTER_LEARNING_RATE = "2e-5", "2e-4"
"""trl's default for all weights, and ten times that, as its documentation recommends for adapters."""
HALF_PRECISION = ("bfloat16", "float16")
"""The types of a model's weights, as transformers names them, with which training is in bf16 by default."""


def parameters() -> list[Parameter]:
    """Return the options of the command: its own, and those of the pipeline that it leaves open."""
    about_model = "The model to start from: a folder in Hugging Face's format, or a repository of the Hub."
    model = panel_option(RUN, about_model, metavar="DIR|OWNER/NAME[@REVISION]")
    about_epochs = "Passes over the conversations, at a constant learning rate. Default: 1, up to 3 where they are few."
    epochs = panel_option(TRAINING, about_epochs, metavar="N", min=1)
    own = [parameter("model", Annotated[str | None, model]), parameter("epochs", Annotated[int | None, epochs])]
    return own + [_with_own_help(option) for option in pipeline_options.parameters() if not _is_left_out(option)]


def _with_own_help(option: Parameter) -> Parameter:
    if option.name not in OWN_HELP:
        return option
    info = copy(option.annotation.__metadata__[0])
    info.help = OWN_HELP[option.name]
    return option.replace(annotation=Annotated[option.annotation.__origin__, info])


def _is_left_out(option: Parameter) -> bool:
    panel = option.annotation.__metadata__[0].rich_help_panel
    return option.name in LEFT_OUT or panel == TOKENIZER


def settings_of(model: str | None, epochs: int | None, **flags: Any) -> Settings:
    """Return the settings of the pipeline for the command line, and print the defaults that they start from."""
    from orchestrator import adapters, pretrained, start_model

    settings = pipeline_options.settings_of(flags)
    if settings.resume is not None:
        return _settings_to_resume(settings, model, epochs)
    start_adapters = adapters.locate(name, "--lora-init-from") if (name := settings.lora_init_from) else None
    if start_adapters is not None:
        model = model or adapters.named_base(start_adapters)
    if model is None:
        raise CommandError("say what to fine-tune: --model DIR, or --model OWNER/NAME of the Hugging Face Hub")
    if settings.dataset is None and not settings.input:
        raise CommandError("say what to train on: --dataset OWNER/NAME of the Hub, or --input FILE")
    if epochs is not None and "steps" in settings.keys:
        raise CommandError("--epochs and --steps both say how long to train: give one of them")
    folder = start_model.locate(model, MODEL_FLAG)
    start = {"init_from": model if pretrained.is_repository(model) else str(folder)}
    if start_adapters is not None:
        _refuse_another_repository(start_adapters, folder)
        start["lora_init_from"] = str(start_adapters)
    settings = replace(settings.with_keys(start), model_flag=MODEL_FLAG, preset=BASE_PRESET)
    defaults = _defaults(settings, folder, epochs)
    settings = replace(
        settings,
        defaults=[f"{key}={value}" for key, value in defaults.items()],
        open_keys=_open_keys(settings, epochs),
    )
    _show(defaults, settings)
    return settings


def _settings_to_resume(settings: Settings, model: str | None, epochs: int | None) -> Settings:
    if model is not None:
        raise CommandError("--resume continues a run as it was started: leave out --model")
    if epochs is None:
        return settings
    return replace(settings, override=[*(settings.override or ()), f"scheduler.total_epochs={epochs}"])


def _defaults(settings: Settings, folder: Path, epochs: int | None) -> dict[str, str]:
    """Return the config keys that differ from the preset's, and their values."""
    from orchestrator.training_length import LONGEST_WARMUP, SEQUENCES_PER_STEP, warmup_of

    model = json_object(folder / "config.json")  # the trainer reports what is wrong with it
    keys = _data_defaults(settings) | {
        "data.sequence_length": str(_sequence_length(model)),
        "data.batch_size": "null",
        "data.gradient_accumulation_steps": "null",
        "data.sequences_per_step": str(SEQUENCES_PER_STEP),
        "optimizer.learning_rate": ADAPTER_LEARNING_RATE if _adapter_rank(settings) else LEARNING_RATE,
        "optimizer.weight_decay": "0.0",
        "scheduler.warmup_steps": str(LONGEST_WARMUP),
        "scheduler.min_lr": "0.0",
        "runtime.precision": _precision(model),
        "runtime.activation_recompute": "null",
        "runtime.log_every_n_steps": "1",
    }
    if {"batch_size", "grad_accum"} <= settings.keys.keys():
        keys["data.sequences_per_step"] = "null"
    if "steps" in settings.keys:
        warmup = str(warmup_of(int(settings.keys["steps"])))
        return keys | {"scheduler.strategy": "cosine", "scheduler.warmup_steps": warmup}
    return keys | {
        "scheduler.strategy": "constant",
        "scheduler.total_steps": "null",
        "scheduler.total_epochs": str(epochs or 1),
    }


def _data_defaults(settings: Settings) -> dict[str, str]:
    """Return the config keys that make rows conversations; none if `--override` says that they are texts."""
    if values_of(settings.config_overrides()).get("data.format", "chat") != "chat":
        return {}
    return {
        "data.format": "chat",
        "data.packing": "documents",
        "data.chat_template_date": datetime.datetime.now().astimezone().date().isoformat(),
    }


def _open_keys(settings: Settings, epochs: int | None) -> OpenKeys | None:
    """Return the keys that may follow from the data; none where the number of steps is given."""
    overrides = values_of(settings.config_overrides())
    if any(key in overrides for key in ("scheduler.total_steps", "stages", "data.tokens_per_step")):
        return None
    batch = ("data.sequences_per_step", "data.batch_size", "data.gradient_accumulation_steps")
    return OpenKeys(
        epochs=epochs is None and "scheduler.total_epochs" not in overrides,
        batch=not any(key in overrides for key in batch),
        warmup="scheduler.warmup_steps" not in overrides,
    )


def _refuse_another_repository(adapters: Path, model: Path) -> None:
    """Refuse a model of another repository than the adapters name; the trainer compares local models."""
    from orchestrator import pretrained, training_record
    from orchestrator.adapters import named_base

    own, base = training_record.repository_of(model), named_base(adapters).partition("@")[0]
    is_repository = pretrained.REPOSITORY.fullmatch(base) and not Path(base).is_dir()
    if own is not None and is_repository and own[0].lower() != base.lower():
        raise CommandError(
            f"the adapters in {shown(adapters)} were trained beside {base}, not beside {own[0]}: "
            "leave out --model, or train new adapters"
        )


def _adapter_rank(settings: Settings) -> str | None:
    """Return the rank of the adapters that train beside the model; none where all of its weights train."""
    from orchestrator import training_record
    from orchestrator.adapters import ADAPTER_CONFIG

    overrides = values_of(settings.config_overrides())
    rank = overrides.get("lora.rank", "null")
    if rank == "null" and (adapters := overrides.get("lora.init_from")):
        rank = str(training_record.read_object(Path(adapters) / ADAPTER_CONFIG).get("r", "null"))
    return None if rank == "null" else rank


def _sequence_length(model: dict[str, Any]) -> int:
    """Return the default sequence length: `SEQUENCE_LENGTH`, at most the model's maximum."""
    longest = model.get("max_position_embeddings")
    return min(SEQUENCE_LENGTH, longest) if isinstance(longest, int) else SEQUENCE_LENGTH


def _precision(model: dict[str, Any]) -> str:
    """Return the default precision: bf16 if the model is stored in a 16-bit type, else fp32.

    A CPU without bf16 instructions multiplies bf16 as fast as f32, and bf16 takes half of the memory.
    """
    return "bf16" if (model.get("dtype") or model.get("torch_dtype")) in HALF_PRECISION else "fp32"


def _show(defaults: dict[str, str], settings: Settings) -> None:
    """Print the main settings of the run: the defaults, replaced by the flags."""
    overrides = values_of(settings.config_overrides())
    values = defaults | overrides
    unit = "step" if "scheduler.total_steps" in overrides else "epoch"
    length = counted(values.get(f"scheduler.total_{unit}s", "1"), unit)
    warmup = f"{counted(values['scheduler.warmup_steps'], 'step')} of warm-up"
    if settings.open_keys is not None:
        length = "epochs by the number of conversations" if settings.open_keys.epochs else length
        warmup = f"at most {warmup}" if settings.open_keys.warmup else warmup
    rank = _adapter_rank(settings)
    weights = f"adapters of rank {rank}" if rank else "all weights"
    step(
        "fine-tune",
        f"{weights}, learning rate {values['optimizer.learning_rate']} ({values['scheduler.strategy']} after "
        f"{warmup}), {length}, sequences of "
        f"{counted(values['data.sequence_length'], 'token')}, packing {values.get('data.packing', 'concat')}, "
        f"precision {values['runtime.precision']}",
    )
