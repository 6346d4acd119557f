"""The config that a run starts from, and what the pipeline fills in before it is written as training.yaml."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator import _native
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.screen import note
from orchestrator.settings import DEMO_DATASET, Settings
from orchestrator.tokenizer import Ready

DEFAULT_PRESET = "smoke_cpu"
LARGE_PRESET = "rtx5090_1b"
FORMATS: dict[str, Literal["yaml", "toml", "json"]] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
}


@dataclass(frozen=True)
class BaseConfig:
    """A config with the flags applied, checked as far as it can be without data and tokenizer."""

    values: dict[str, Any]
    described: str
    is_preset: bool

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary that the config asks for."""
        size: int | None = self.values["model"]["vocab_size"]
        return size

    @property
    def tokenizer_json(self) -> Path | None:
        """The tokenizer that the config names."""
        named = self.values["tokenizer"]["tokenizer_json"]
        return Path(named) if named else None

    @property
    def train_shards(self) -> list[str]:
        """The local files that the config names."""
        shards: list[str] = self.values["data"]["train_shards"]
        return shards

    @property
    def text_column(self) -> str:
        """The column or field that holds the text."""
        return str(self.values["data"]["text_column"])

    @property
    def checkpoints(self) -> Path | None:
        """The checkpoint folder that the config names."""
        named = self.values["runtime"]["checkpoint"]["directory"]
        return Path(named) if named else None

    @property
    def tokens_in_all(self) -> int | None:
        """Tokens that the whole run takes, where the config says how long it is."""
        steps = self.values["scheduler"]["total_steps"]
        data = self.values["data"]
        return steps * data["sequences_per_step"] * data["sequence_length"] if steps else None


def choose(settings: Settings) -> BaseConfig:
    """Return the config to start from: --config, --preset, or the preset for CPUs."""
    overrides = settings.config_overrides()
    if settings.config is not None:
        text, kind = _read(settings.config)
        values = _native.parse_config(text, kind, overrides, settings.config)
        return BaseConfig(values, shown(settings.config), is_preset=False)
    name = settings.preset or _default_preset(settings)
    return BaseConfig(_native.parse_config(preset_text(name), "yaml", overrides), f"preset {name}", is_preset=True)


def preset_text(name: str) -> str:
    """Return a shipped config, or raise a `CommandError` that names those there are."""
    presets = _native.presets()
    if name not in presets:
        raise CommandError(f"--preset {name!r} is not shipped: take one of {', '.join(presets)}, or --config FILE")
    return presets[name]


def complete(base: BaseConfig, settings: Settings, tokenizer: Ready, shards: list[str] | None) -> dict[str, Any]:
    """Return the config with the tokenizer, its vocabulary and the local files in it.

    Args:
        base: What the run starts from.
        settings: The flags.
        tokenizer: The tokenizer that is ready.
        shards: The local files to train on; none when a data set is streamed.
    """
    values = copy.deepcopy(base.values)
    values["tokenizer"]["tokenizer_json"] = shown(tokenizer.path)
    # A config of the user's own that asks for a larger vocabulary than the tokenizer's gets it.
    if base.is_preset or settings.vocab_size or base.vocab_size is None:
        values["model"]["vocab_size"] = tokenizer.vocab_size
    if shards is not None:
        values["data"]["train_shards"] = shards
    if settings.validation:
        values["data"]["validation_shards"] = absolute(settings.validation)
    return values


def absolute(patterns: list[str]) -> list[str]:
    """Return files, folders and globs so that they mean the same from every folder."""
    return [shown(Path(pattern)) for pattern in patterns]


def _read(path: Path) -> tuple[str, Literal["yaml", "toml", "json"]]:
    if path.suffix not in FORMATS:
        raise CommandError(f"--config {shown(path)}: the name must end in .yaml, .toml or .json")
    try:
        return path.read_text(encoding="utf-8"), FORMATS[path.suffix]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read --config {shown(path)}: {error}") from error


def _default_preset(settings: Settings) -> str:
    if settings.dataset != DEMO_DATASET:
        note(f"The model is that of {DEFAULT_PRESET}, for CPUs; --preset {LARGE_PRESET} takes the 1B one.")
    return DEFAULT_PRESET
