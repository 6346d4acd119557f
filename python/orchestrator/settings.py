"""The flags of `orchestrate`: which config keys have one, and those that are the pipeline's own."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Context, Exit, Option

from orchestrator import _native, terminal
from orchestrator.depth import MAX_DEPTH, MIN_DEPTH
from orchestrator.help_text import HELP_ALL
from orchestrator.options import ConfigFlag, parameter, takes, trainer_command

DEFAULT_DATASET = "HuggingFaceFW/fineweb"
DEMO_DATASET = "demo"
DEFAULT_SPLIT = "train"
DEFAULT_STREAM_BATCH_SIZE = 1000
DEFAULT_TOKENIZER_LINES = 100_000

DATA = "Data"
TOKENIZER = "Tokenizer"
MODEL = "Model"
TRAINING = "Training"
OFTEN = "How often"
RUN = "Run"
PANELS = (DATA, TOKENIZER, MODEL, TRAINING, OFTEN, RUN)
"""The panels of the help text, in their order."""

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

TRAINER_FLAGS = ("override", "resume", "rebatch", "accept_changed_data", "time_limit", "profile")
"""The options of the trainer's `train` that the pipeline takes as well."""


class Launch(str, enum.Enum):
    """What trains once the files are written: the Rust program, this process, or nothing."""

    AUTO = "auto"
    PROCESS = "process"
    BINDINGS = "bindings"
    NONE = "none"


def _flag(panel: str, help: str, *names: str, **details: Any) -> Any:
    return Option(*names, help=help, rich_help_panel=panel, **details)


Preset = Annotated[
    str | None,
    _flag(
        RUN,
        "Start from this shipped config. Default: the largest that this machine's GPU trains, else smoke_cpu.",
        metavar="NAME",
    ),
]
PlannedPreset = Annotated[str | None, _flag(RUN, "Plan this shipped config.", metavar="NAME")]
Ranks = Annotated[
    int | None,
    _flag(
        RUN,
        "Train in N processes on this machine, each on a GPU of its own or on the CPU. Needs PyTorch.",
        metavar="N",
        min=1,
    ),
]
Depth = Annotated[
    int | None,
    _flag(
        RUN,
        "Start from a model of N layers: width, heads, learning rate, batch and length of training follow from it.",
        metavar="N",
        min=MIN_DEPTH,
        max=MAX_DEPTH,
    ),
]
LaunchMode = Annotated[
    Launch,
    _flag(
        RUN,
        "Train in the Rust program (process), in this process (bindings), or only write the files (none). auto takes "
        "the program where it is found, else the bindings.",
    ),
]


def _show_all_options(context: Context, is_asked: bool) -> None:
    if is_asked:
        context.meta[HELP_ALL] = True
        terminal.result(context.get_help())
        raise Exit


Version = Annotated[bool, _flag(RUN, "Print the version.", "--version", "-V")]
HelpAll = Annotated[
    bool,
    _flag(RUN, "Show every option.", HELP_ALL, is_eager=True, callback=_show_all_options),
]


@dataclass(frozen=True)
class OpenKeys:
    """The keys of the length of a run that were left open, and follow from the data."""

    epochs: bool
    batch: bool
    warmup: bool


@dataclass
class Settings:
    """The values of the pipeline's flags; None or empty for one that was not typed."""

    stream: Annotated[bool, _flag(DATA, "Stream a data set (what happens anyway without --input).", "--stream")] = False
    dataset: Annotated[
        str | None,
        _flag(
            DATA,
            "A data set of the Hugging Face Hub, or `demo`: this machine's own Python sources. "
            f"Default: {DEFAULT_DATASET}.",
            metavar="NAME",
        ),
    ] = None
    data_config: Annotated[
        str | None, _flag(DATA, "The data set's configuration, such as sample-10BT.", metavar="NAME")
    ] = None
    split: Annotated[
        str | None,
        _flag(DATA, f"The split of the data set, or of an --input folder. Default: {DEFAULT_SPLIT}.", metavar="NAME"),
    ] = None
    revision: Annotated[
        str | None,
        _flag(DATA, "The data set's commit, branch or tag. Default: the newest commit, then pinned.", metavar="SHA"),
    ] = None
    max_samples: Annotated[
        int | None,
        _flag(
            DATA,
            "Use only the first N documents, repeated as epochs. Default: the whole data set, for ever.",
            metavar="N",
            min=1,
        ),
    ] = None
    stream_batch_size: Annotated[
        int | None,
        _flag(
            DATA,
            "Kept in streaming_config.json for other readers; our own reader goes by row groups. "
            f"Default: {DEFAULT_STREAM_BATCH_SIZE}.",
            metavar="N",
            min=1,
        ),
    ] = None
    input: Annotated[
        list[str],
        _flag(
            DATA,
            "Train on local .parquet, .json, .jsonl(.gz/.zst) or .txt instead: a file, folder or glob. Others, such as "
            ".md or .py, are read as text if they are named. Repeatable.",
            metavar="PATH",
        ),
    ] = field(default_factory=list)
    validation: Annotated[
        list[str],
        _flag(
            DATA,
            "Evaluate on these files. Default: row groups held out of the training data. Repeatable.",
            metavar="PATH",
        ),
    ] = field(default_factory=list)

    vocab_size: Annotated[
        int | None,
        _flag(
            TOKENIZER,
            "Tokens in the vocabulary to train. Default: the config's model.vocab_size.",
            metavar="N",
            min=1,
        ),
    ] = None
    tokenizer_json: Annotated[
        Path | None, _flag(TOKENIZER, "Use this tokenizer.json instead of training one.", metavar="FILE")
    ] = None
    skip_tokenizer: Annotated[
        bool,
        _flag(TOKENIZER, "Use the experiment's tokenizer as it is, whatever it was trained on.", "--skip-tokenizer"),
    ] = False
    force_retrain_tokenizer: Annotated[
        bool,
        _flag(TOKENIZER, "Train the tokenizer even if a fitting one exists.", "--force-retrain-tokenizer"),
    ] = False
    tokenizer_max_lines: Annotated[
        int,
        _flag(
            TOKENIZER,
            "Train the tokenizer on at most N documents (and 256 MB): all their words are held in memory.",
            metavar="N",
            min=1,
        ),
    ] = DEFAULT_TOKENIZER_LINES
    tokenizer_seed: Annotated[
        int | None,
        _flag(
            TOKENIZER,
            "Train the tokenizer on every second document, chosen by this seed. Default: on the first ones.",
            metavar="N",
            min=0,
        ),
    ] = None

    experiment: Annotated[
        str | None,
        _flag(
            RUN,
            "Names the run's folder and its tokenizer. Default: from the data set's name.",
            metavar="NAME",
        ),
    ] = None
    run_dir: Annotated[Path | None, _flag(RUN, "This run's own folder. Default: runs/EXPERIMENT.", metavar="DIR")] = (
        None
    )
    config: Annotated[
        Path | None, _flag(RUN, "Start from this config (YAML, TOML or JSON) instead of a preset.", metavar="FILE")
    ] = None
    preset: Preset = None
    depth: Depth = None
    launch: LaunchMode = Launch.AUTO
    nproc: Ranks = None

    override: list[str] | None = None
    resume: str | None = None
    rebatch: bool = False
    accept_changed_data: bool = False
    time_limit: str | None = None
    profile: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    """The values of `CONFIG_FLAGS`, by the flags' names."""
    defaults: list[str] = field(default_factory=list)
    """Config keys (`key=value`) that a command sets unless a flag or an `--override` does."""
    model_flag: str = "--init-from"
    """The flag of the command that names the model to start from, for messages."""
    open_keys: OpenKeys | None = None
    """None where the length of the run is given."""

    def config_overrides(self) -> list[str]:
        """Return the flags that were typed as `key=value`, the explicit `--override`s last."""
        typed = [f"{flag.key}={_scalar(self.keys[flag.name])}" for flag in CONFIG_FLAGS if flag.name in self.keys]
        return typed + (self.override or [])

    @property
    def init_from(self) -> str | None:
        """The model that training starts from."""
        return self.keys.get("init_from")

    def flags_of_keys(self) -> dict[str, str]:
        """Return the typed flags by the key that they set, without those that an `--override` replaces.

        A key that only the command itself sets is said to be its default.
        """
        outranked = {override.partition("=")[0].strip() for override in self.override or []}
        defaults = {default.partition("=")[0]: "a default of this command" for default in self.defaults}
        flags = {flag.key: flag.flag for flag in CONFIG_FLAGS if flag.name in self.keys}
        if "model.init_from" in flags:
            flags["model.init_from"] = self.model_flag
        named = {key: flag for key, flag in {**defaults, **flags}.items() if key not in outranked}
        # --vocab-size takes precedence over an override.
        return named if self.vocab_size is None else {**named, "model.vocab_size": "--vocab-size"}

    def asked_device(self) -> str:
        """Return the device that was typed, as a flag or as an override."""
        typed = [override.partition("=") for override in self.config_overrides()]
        return ["auto", *(value for key, _, value in typed if key == "runtime.device")][-1]


def _scalar(value: object) -> str:
    """Return a flag's value as the config has it."""
    return value if isinstance(value, str) else json.dumps(value)


def takes_settings(command: Callable[[Context, Settings], None]) -> Callable[..., None]:
    """Turn a function of `Settings` into one with a parameter per flag, as Typer wants it."""

    def typed(context: Context, version: bool, **flags: Any) -> None:
        if version:
            terminal.result(f"orchestrate {_native.__version__}")
            raise Exit
        command(context, from_flags(flags))

    context = parameter("context", Context, default=Parameter.empty)
    return takes([context, *flag_parameters(), parameter("version", Version, False)], command.__doc__ or "")(typed)


def from_flags(flags: dict[str, Any]) -> Settings:
    """Return the settings from the values of `flag_parameters`, or of some of them."""
    rest = {name: value for name, value in flags.items() if name != "help_all"}
    keys = {flag.name: rest.pop(flag.name, None) for flag in CONFIG_FLAGS}
    return Settings(keys={name: value for name, value in keys.items() if value is not None}, **rest)


def flag_parameters() -> list[Parameter]:
    """Return an option per flag, panel by panel."""
    hints = get_type_hints(Settings, include_extras=True)
    found = []
    for flag in fields(Settings):
        if hasattr(hints[flag.name], "__metadata__"):
            default: Any = flag.default_factory() if callable(flag.default_factory) else flag.default
            found.append(parameter(flag.name, hints[flag.name], default))
    found += trainer_command("train").parameters(TRAINER_FLAGS, RUN)
    found += [flag.parameter() for flag in CONFIG_FLAGS]
    found.append(parameter("help_all", HelpAll, default=False))
    return sorted(found, key=lambda option: PANELS.index(option.annotation.__metadata__[0].rich_help_panel))
