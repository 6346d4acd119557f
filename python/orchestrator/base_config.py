"""The config that a run starts from, and what the pipeline fills in before it is written as training.yaml."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator import _native, depth, gpus
from orchestrator.command_error import CommandError
from orchestrator.config_flags import values_of
from orchestrator.input_files import read_text, readable
from orchestrator.options import trainer_command
from orchestrator.paths import shown
from orchestrator.screen import amount, note
from orchestrator.settings import DEFAULT_OF_COMMAND, DEMO_DATASET, Launch, Settings
from orchestrator.tokenizer import Ready

DEFAULT_PRESET = "smoke_cpu"
LARGE_PRESET = "1b"
GPU_PRESETS = (LARGE_PRESET, "500m", "350m", "125m", "25m")
"""The presets for GPUs, largest first."""
FORMATS: dict[str, Literal["yaml", "toml", "json"]] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
}
PRETRAINED_OVERRIDES = (
    "optimizer.algorithm=adamw", "optimizer.learning_rate=5e-5", "optimizer.embedding_learning_rate_scale=1",
    "scheduler.min_lr=null",
)  # fmt: skip
"""For a pretrained model, in place of values of a preset that only suit randomly initialised weights."""


@dataclass(frozen=True)
class BaseConfig:
    """A config with the flags applied, checked as far as it can be without data and tokenizer."""

    values: dict[str, Any]
    origin: str
    """What it was made from, as messages say it."""
    is_preset: bool
    depth: int | None = None
    """The number of layers given with `--depth`, if the config was made from it."""

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary that the config asks for."""
        size: int | None = self.values["model"]["vocab_size"]
        return size

    @property
    def start_adapters(self) -> Path | None:
        """The folder of the adapters that training starts from."""
        return _path(self.values["lora"]["init_from"])

    @property
    def pretrained(self) -> Path | None:
        """The model that training starts from."""
        return _path(self.values["model"]["init_from"])

    @property
    def tokenizer_json(self) -> Path | None:
        """The tokenizer that the config names, or that of the model that training starts from."""
        path = self.values["tokenizer"]["tokenizer_json"]
        if path is None and self.pretrained is not None:
            return self.pretrained / "tokenizer.json"
        return _path(path)

    @property
    def data(self) -> dict[str, Any]:
        """The section of the text to train on."""
        data: dict[str, Any] = self.values["data"]
        return data

    @property
    def checkpoints(self) -> Path | None:
        """The checkpoint folder that the config names."""
        return _path(self.values["runtime"]["checkpoint"]["directory"])

    @property
    def tokens_in_all(self) -> int | None:
        """Tokens that the whole run trains on; None if the config gives no number of steps."""
        steps = self.values["scheduler"]["total_steps"]
        stages: list[dict[str, int]] = self.values["stages"] or []
        if stages:
            return sum(stage["steps"] * stage["sequences_per_step"] * stage["sequence_length"] for stage in stages)
        return steps * self.data["sequences_per_step"] * self.data["sequence_length"] if steps else None


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None


def choose(settings: Settings) -> BaseConfig:
    """Return the config to start from: --config, --depth, --preset, or the preset that suits this machine."""
    overrides, flags = settings.config_overrides(), settings.flags_of_keys()
    if settings.vocab_size is not None:
        # The vocabulary size to train the tokenizer with; the config that is written holds the size that it then has.
        overrides.append(f"model.vocab_size={settings.vocab_size}")
    if settings.config is not None:
        text, kind = _read(settings.config)
        values = _native.parse_config(text, kind, overrides, settings.config, flags)
        return BaseConfig(values, shown(settings.config), is_preset=False)
    if settings.depth is not None:
        values = _native.parse_config(depth.preset(settings.depth, settings.vocab_size), "yaml", overrides, flags=flags)
        return BaseConfig(values, f"depth {settings.depth}", is_preset=True, depth=settings.depth)
    name = settings.preset or _default_preset(settings)
    if settings.init_from is not None:
        # No key of the preset's model is kept: null keys take the pretrained model's values.
        sizes = [f"model.{key}=null" for key in _native.json_schema()["properties"]["model"]["properties"]]
        flags = dict.fromkeys(values_of(PRETRAINED_OVERRIDES), DEFAULT_OF_COMMAND) | flags
        overrides = [*sizes, *PRETRAINED_OVERRIDES, *settings.defaults, *overrides]
    values = _native.parse_config(preset_text(name), "yaml", overrides, flags=flags)
    return BaseConfig(values, f"preset {name}", is_preset=True)


def preset_text(name: str, flag: str = "--preset ") -> str:
    """Return a shipped config, or raise a `CommandError` that names those there are.

    Args:
        name: Its name.
        flag: How the name was typed, before it.
    """
    presets = _native.presets()
    if name not in presets:
        way_out = ", or --config FILE" if flag else ""
        raise CommandError(f"{flag}{name!r} is not a preset: use one of {', '.join(presets)}{way_out}")
    return presets[name]


def config_file(name: str, text: str, folder: Path) -> Path:
    """Write a config into a folder and return its path."""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def preset_of_depth(layers: int, vocab_size: int | None, plan_options: dict[str, Any]) -> str:
    """Return the config of `--depth` as YAML, with the memory that the plan needs for it as comments.

    Args:
        layers: The depth.
        vocab_size: Tokens in the vocabulary; None for the usual one.
        plan_options: Values of `plan`'s options `--gpu` and `--memory`; without one it plans for this machine.
    """
    text = depth.preset(layers, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        path = config_file(f"depth-{layers}", text, Path(folder))
        words = trainer_command("plan").words({**plan_options, "config": path, "json": True})
        output: list[str] = []
        if _native.run_command(words, output.append, False) != 0:
            raise CommandError(f"the plan of depth {layers} failed")
    plan = json.loads("".join(output))
    if plan["shortage"] is not None:
        memory = f"does not fit, {amount(plan['bytes'])} are needed; take a smaller depth."
    else:
        sequences = f"{plan['micro_batch']} x {plan['gradient_accumulation_steps']} sequences"
        memory = f"{amount(plan['bytes'])} of buffers, as {sequences}."
    flags = [f"--{name} {value}" for name, value in plan_options.items() if value is not None]
    command = " ".join([f"orchestrate plan --depth {layers}", *flags])
    return depth.preset(layers, vocab_size, [f"What `{command}` says:", "", f"  {plan['device']['name']}: {memory}"])


def complete(
    base: BaseConfig,
    settings: Settings,
    tokenizer: Ready,
    shards: list[str] | None,
    mixture: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Return the config of a run, with the tokenizer's vocabulary size and the text to train on filled in.

    Args:
        base: What the run starts from.
        settings: The flags.
        tokenizer: The tokenizer that is ready.
        shards: The local files to train on; None when a data set is streamed.
        mixture: The sources to mix, each pinned to a commit; None where there is only one source.
    """
    values = copy.deepcopy(base.values)
    # Null keys are completed from the run's folder: its copy of the tokenizer, and special_tokens.txt.
    values["tokenizer"].update(tokenizer_json=None, vocab=None, merges=None)
    # A config of the user's own that asks for a larger vocabulary than the tokenizer's gets it.
    if base.pretrained is None and (base.is_preset or settings.vocab_size or base.vocab_size is None):
        values["model"]["vocab_size"] = tokenizer.vocab_size
    if shards is not None:
        values["data"].update(train_shards=shards, split=settings.split or base.data["split"])
        values["data"]["max_samples"] = settings.max_samples or base.data["max_samples"]
    if mixture is not None:
        values["data"]["mixture"] = mixture
    if settings.validation:
        values["data"]["validation_shards"] = absolute(settings.validation)
    return values


def absolute(patterns: list[str]) -> list[str]:
    """Return files, folders and globs as absolute paths."""
    return [shown(Path(pattern)) for pattern in patterns]


def _read(path: Path) -> tuple[str, Literal["yaml", "toml", "json"]]:
    if path.suffix not in FORMATS:
        raise CommandError(f"--config {shown(path)}: the name must end in .yaml, .toml or .json")
    with readable(f"--config {shown(path)}"):
        text = read_text(path)
    return text, FORMATS[path.suffix]


def _default_preset(settings: Settings) -> str:
    """Return the largest preset that the GPU which would be used holds, else the one for CPUs, and say which."""
    if settings.dataset == DEMO_DATASET:
        return DEFAULT_PRESET
    device = settings.requested_device
    text, flags = preset_text(DEFAULT_PRESET), settings.flags_of_keys()
    _native.parse_config(text, "yaml", [f"runtime.device={device}"], flags=flags)  # raises if it is no device
    try:
        gpu = gpus.usable(device)
    except _native.ConfigError as error:
        if settings.launch is not Launch.NONE:
            raise
        raise CommandError(f"{error}. --preset NAME prepares a run for another machine") from error
    if gpu is None:
        note(f"Using preset {DEFAULT_PRESET}, for CPUs; --preset {LARGE_PRESET} selects the 1B model.")
        return DEFAULT_PRESET
    size = f"{gpu.name} ({amount(gpu.total_bytes)})"
    for name in GPU_PRESETS:
        if _fits(name, gpu):
            note(f"Using preset {name}, the largest that fits {size}; --preset selects another.")
            return name
    note(f"Using preset {DEFAULT_PRESET}: {', '.join(GPU_PRESETS[:-1])} and {GPU_PRESETS[-1]} do not fit {size}.")
    return DEFAULT_PRESET


def _fits(preset: str, gpu: _native.Gpu) -> bool:
    """Whether the memory plan of a preset fits into the free memory of a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = config_file(preset, preset_text(preset), Path(folder))
        config = _native.RunConfig.load_for_planning(path, [f"runtime.device=cuda:{gpu.ordinal}"])
        return _native.memory_plan(config).to_dict()["shortage"] is None
