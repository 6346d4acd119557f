"""The values of the pipeline's flags, each field declared together with its option."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from orchestrator.config_flags import CONFIG_FLAGS, values_of
from orchestrator.depth import MAX_DEPTH, MIN_DEPTH
from orchestrator.help_text import DATA, RUN, TOKENIZER
from orchestrator.options import panel_option

DEFAULT_DATASET = "HuggingFaceFW/fineweb"
DEMO_DATASET = "demo"
DEFAULT_SPLIT = "train"
DEFAULT_STREAM_BATCH_SIZE = 1000
DEFAULT_TOKENIZER_LINES = 100_000
DEFAULT_OF_COMMAND = "a default of this command"
"""What messages say in place of a flag of a config key that only the command itself sets."""


class Launch(str, enum.Enum):
    """What trains once the files are written: the Rust program, this process, or nothing."""

    AUTO = "auto"
    PROCESS = "process"
    BINDINGS = "bindings"
    NONE = "none"


Preset = Annotated[
    str | None,
    panel_option(
        RUN,
        "Start from this shipped config. Default: the largest that this machine's GPU trains, else smoke_cpu.",
        metavar="NAME",
    ),
]
PlannedPreset = Annotated[str | None, panel_option(RUN, "Plan this shipped config.", metavar="NAME")]
Ranks = Annotated[
    int | None,
    panel_option(
        RUN,
        "Train in N processes on this machine, each on a GPU of its own or on the CPU. Needs PyTorch.",
        metavar="N",
        min=1,
    ),
]
Depth = Annotated[
    int | None,
    panel_option(
        RUN,
        "Start from a model of N layers: width, heads, learning rate, batch and length of training follow from it.",
        metavar="N",
        min=MIN_DEPTH,
        max=MAX_DEPTH,
    ),
]
LaunchMode = Annotated[
    Launch,
    panel_option(
        RUN,
        "Train in the Rust program (process), in this process (bindings), or only write the files (none). auto takes "
        "the program where it is found, else the bindings.",
    ),
]


@dataclass(frozen=True)
class OpenKeys:
    """The keys of the length of a run that were left open, and follow from the data."""

    epochs: bool
    batch: bool
    warmup: bool


@dataclass(frozen=True)
class Settings:
    """The values of the pipeline's flags; None or empty for one that was left out."""

    stream: Annotated[
        bool, panel_option(DATA, "Stream a data set (what happens anyway without --input).", "--stream")
    ] = False
    dataset: Annotated[
        str | None,
        panel_option(
            DATA,
            "A data set of the Hugging Face Hub, or `demo`: this machine's own Python sources. "
            f"Default: {DEFAULT_DATASET}.",
            metavar="NAME",
        ),
    ] = None
    data_config: Annotated[
        str | None, panel_option(DATA, "The data set's configuration, such as sample-10BT.", metavar="NAME")
    ] = None
    split: Annotated[
        str | None,
        panel_option(
            DATA, f"The split of the data set, or of an --input folder. Default: {DEFAULT_SPLIT}.", metavar="NAME"
        ),
    ] = None
    revision: Annotated[
        str | None,
        panel_option(
            DATA, "The data set's commit, branch or tag. Default: the newest commit, then pinned.", metavar="SHA"
        ),
    ] = None
    max_samples: Annotated[
        int | None,
        panel_option(
            DATA,
            "Use only the first N documents, repeated as epochs. Default: the whole data set, for ever.",
            metavar="N",
            min=1,
        ),
    ] = None
    stream_batch_size: Annotated[
        int | None,
        panel_option(
            DATA,
            "Kept in streaming_config.json for other readers; our own reader goes by row groups. "
            f"Default: {DEFAULT_STREAM_BATCH_SIZE}.",
            metavar="N",
            min=1,
        ),
    ] = None
    input: Annotated[
        list[str],
        panel_option(
            DATA,
            "Train on local .parquet, .json, .jsonl(.gz/.zst) or .txt instead: a file, folder or glob. Others, such as "
            ".md or .py, are read as text if they are named. Repeatable.",
            metavar="PATH",
        ),
    ] = field(default_factory=list)
    validation: Annotated[
        list[str],
        panel_option(
            DATA,
            "Evaluate on these files. Default: row groups held out of the training data. Repeatable.",
            metavar="PATH",
        ),
    ] = field(default_factory=list)

    vocab_size: Annotated[
        int | None,
        panel_option(
            TOKENIZER,
            "Tokens in the vocabulary to train. Default: the config's model.vocab_size.",
            metavar="N",
            min=1,
        ),
    ] = None
    tokenizer_json: Annotated[
        Path | None, panel_option(TOKENIZER, "Use this tokenizer.json instead of training one.", metavar="FILE")
    ] = None
    skip_tokenizer: Annotated[
        bool,
        panel_option(
            TOKENIZER, "Use the experiment's tokenizer as it is, whatever it was trained on.", "--skip-tokenizer"
        ),
    ] = False
    force_retrain_tokenizer: Annotated[
        bool,
        panel_option(TOKENIZER, "Train the tokenizer even if a fitting one exists.", "--force-retrain-tokenizer"),
    ] = False
    tokenizer_max_lines: Annotated[
        int,
        panel_option(
            TOKENIZER,
            "Train the tokenizer on at most N documents (and 256 MB): all their words are held in memory.",
            metavar="N",
            min=1,
        ),
    ] = DEFAULT_TOKENIZER_LINES
    tokenizer_seed: Annotated[
        int | None,
        panel_option(
            TOKENIZER,
            "Train the tokenizer on every second document, chosen by this seed. Default: on the first ones.",
            metavar="N",
            min=0,
        ),
    ] = None

    experiment: Annotated[
        str | None,
        panel_option(
            RUN,
            "Names the run's folder and its tokenizer. Default: from the data set's name.",
            metavar="NAME",
        ),
    ] = None
    run_dir: Annotated[
        Path | None, panel_option(RUN, "This run's own folder. Default: runs/EXPERIMENT.", metavar="DIR")
    ] = None
    config: Annotated[
        Path | None,
        panel_option(RUN, "Start from this config (YAML, TOML or JSON) instead of a preset.", metavar="FILE"),
    ] = None
    preset: Preset = None
    depth: Depth = None
    launch: LaunchMode = Launch.AUTO
    nproc: Ranks = None

    override: Sequence[str] | None = None
    resume: str | None = None
    rebatch: bool = False
    accept_changed_data: bool = False
    time_limit: str | None = None
    profile: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The values of `CONFIG_FLAGS`, by the flags' names."""
    defaults: Sequence[str] = ()
    """Config keys (`key=value`) that a command sets unless a flag or an `--override` does."""
    model_flag: str = "--init-from"
    """The flag of the command that names the model to start from, for messages."""
    open_keys: OpenKeys | None = None
    """None where the length of the run is given."""

    @property
    def init_from(self) -> str | None:
        """The model that training starts from."""
        return self.keys.get("init_from")

    @property
    def lora_init_from(self) -> str | None:
        """The adapters that training starts from."""
        return self.keys.get("lora_init_from")

    @property
    def experiment_name(self) -> str:
        """The name of the experiment: by default that of the data set, or of the first of the local files."""
        if self.experiment is not None:
            return self.experiment
        data = Path(self.input[0]).stem if self.input else self.dataset or DEFAULT_DATASET
        return re.sub(r"[^A-Za-z0-9._-]+", "-", data.rsplit("/", 1)[-1]).strip("-._").lower() or "run"

    @property
    def requested_device(self) -> str:
        """The device that a flag or an override names."""
        return values_of(self.config_overrides()).get("runtime.device", "auto")

    def with_keys(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings with other values of `CONFIG_FLAGS`, by the flags' names."""
        return replace(self, keys={**self.keys, **values})

    def config_overrides(self) -> list[str]:
        """Return the flags of config keys as `key=value`, the explicit `--override`s last."""
        flags = [f"{flag.key}={_scalar(self.keys[flag.name])}" for flag in CONFIG_FLAGS if flag.name in self.keys]
        return [*flags, *(self.override or ())]

    def flags_of_keys(self) -> dict[str, str]:
        """Return the flags by the key that they set, without those that an `--override` replaces.

        A key that only the command itself sets is said to be its default.
        """
        flags = dict.fromkeys(values_of(self.defaults), DEFAULT_OF_COMMAND)
        flags |= {flag.key: flag.flag for flag in CONFIG_FLAGS if flag.name in self.keys}
        if "init_from" in self.keys:
            flags["model.init_from"] = self.model_flag
        for key in values_of(self.override or ()):
            flags.pop(key, None)
        # --vocab-size takes precedence over an override.
        return flags if self.vocab_size is None else {**flags, "model.vocab_size": "--vocab-size"}


def _scalar(value: object) -> str:
    """Return a flag's value as the config has it."""
    return value if isinstance(value, str) else json.dumps(value)
