"""What the command line asks for, resolved once: flags, run directory and base config, with all models located."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import _native, adapters, base_config, flag_checks, pretrained, start_model, training_record
from orchestrator.base_config import BaseConfig
from orchestrator.paths import Roots, RunLocation, shown
from orchestrator.screen import note, step
from orchestrator.settings import Settings
from orchestrator.training_source import Source


@dataclass(frozen=True)
class RunRequest:
    """A run that is to be started: nothing of it has been written, and every flag has been checked."""

    settings: Settings
    """The flags, with the folders of model and adapters in place of their names."""
    location: RunLocation
    base: BaseConfig

    @property
    def tokenizer_json(self) -> Path | None:
        """The tokenizer that a flag or the config names, or that of the model that training starts from."""
        return self.settings.tokenizer_json or self.base.tokenizer_json

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoint folder."""
        return self.base.checkpoints or self.location.folder / "checkpoints"

    def max_samples(self, source: Source) -> int | None:
        """Return the number of rows of the source to train on; None for all."""
        return self.settings.max_samples or (self.base.data["max_samples"] if source.shards else None)


def resolve(settings: Settings, roots: Roots) -> RunRequest:
    """Return the run to start, or raise an error for what it cannot be started with. Writes no file of the run.

    Args:
        settings: The flags, which do not contradict each other.
        roots: The folders of runs and tokenizers.
    """
    location = roots.location(settings.experiment_name, settings.run_dir)
    start_adapters = adapters.locate(name, "--lora-init-from") if (name := settings.lora_init_from) else None
    if start_adapters is not None:
        settings = settings.with_keys({"lora_init_from": str(start_adapters)})
    model_name = _model_name(settings, start_adapters)
    if model_name is not None:
        settings = settings.with_keys({"init_from": str(_locate_model(model_name, settings.model_flag))})
    base = base_config.choose(settings)
    if base.pretrained is not None:
        if model_name is not None:
            pretrained.download(model_name, base.pretrained, settings.model_flag)
        pretrained.check(base.pretrained, settings.tokenizer_json or base.tokenizer_json)
        if base.start_adapters is not None:
            _native.check_start_adapters(base.start_adapters, base.pretrained)
            base = _with_chat_template(base, base.start_adapters, base.pretrained)
    flag_checks.check_machine(settings, base, roots)
    return RunRequest(settings, location, base)


def _model_name(settings: Settings, start_adapters: Path | None) -> str | None:
    """Return the model that a flag names, or that of the adapters, unless a config says what to start from."""
    if start_adapters is None or settings.config is not None:
        return settings.init_from
    return settings.init_from or adapters.named_base(start_adapters)


def _locate_model(name: str, flag: str) -> Path:
    """Return the folder of the model that training starts from, and print its repository where it is of the Hub."""
    folder = start_model.locate(name, flag)
    if repository := training_record.repository_of(folder):
        step("model", f"{repository[0]} at {repository[1][:12]}")
    return folder


def _with_chat_template(base: BaseConfig, start_adapters: Path, model: Path) -> BaseConfig:
    """Render conversations as those were that the adapters were trained on, unless the config names a template."""
    data = base.values["data"]
    if data["format"] != "chat" or data["chat_template"] is not None:
        return base
    template = adapters.own_chat_template(start_adapters, model)
    if template is None:
        return base
    note(f"the chat template is that of the adapters, {shown(template)}; --chat-template names another one")
    return replace(base, values={**base.values, "data": {**data, "chat_template": str(template)}})
