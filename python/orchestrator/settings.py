"""The flags of `orchestrate`: one field a flag, with its type, its help, its panel and the config key it sets."""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Context, Option

DEFAULT_DATASET = "HuggingFaceFW/fineweb"
DEMO_DATASET = "demo"
DEFAULT_TOKENIZER_LINES = 100_000

DATA = "Data"
TOKENIZER = "Tokenizer"
MODEL = "Model"
TRAINING = "Training"
OFTEN = "How often"
RUN = "Run"


class Launch(str, enum.Enum):
    """Who trains once the files are written."""

    AUTO = "auto"
    PROCESS = "process"
    BINDINGS = "bindings"
    NONE = "none"


class Schedule(str, enum.Enum):
    """How the learning rate goes after warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


class Packing(str, enum.Enum):
    """How far attention reaches in a sequence that holds several documents."""

    CONCAT = "concat"
    DOCUMENTS = "documents"


class Precision(str, enum.Enum):
    """What the arithmetic is done in."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class Key:
    """The config key that a flag overrides."""

    path: str


ConfigFile = Annotated[
    Path | None,
    Option(help="Start from this config (YAML, TOML or JSON) instead of a preset.", rich_help_panel=RUN),
]
Preset = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Start from this shipped config. Default: the largest that this machine's card trains, else smoke_cpu.",
        rich_help_panel=RUN,
    ),
]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--override", metavar="KEY=VALUE", help="Set any config key, such as optimizer.beta2=0.99. Repeatable.",
        rich_help_panel=RUN,
    ),
]  # fmt: skip
Resume = Annotated[
    str | None,
    Option(
        metavar="[latest|DIR]",
        help="Go on from the run's newest sound checkpoint, or from the checkpoint directory named.",
        rich_help_panel=RUN,
    ),
]
Rebatch = Annotated[
    bool,
    Option(
        "--rebatch",
        help="With --resume: compute steps with the config's micro-batch and recompute mode, not the checkpoint's. "
        "The weights then agree with those of an uninterrupted run up to rounding only.",
        rich_help_panel=RUN,
    ),
]
LaunchMode = Annotated[
    Launch,
    Option(
        help="Train in the Rust program (process), in this process (bindings), or only write the files (none). auto "
        "takes the program where it is found, else the bindings.",
        rich_help_panel=RUN,
    ),
]
DeviceName = Annotated[
    str | None,
    Option(metavar="[auto|cpu|cuda|cuda:N]", help="What to train on.", rich_help_panel=RUN),
    Key("runtime.device"),
]


@dataclass
class Settings:
    """What was typed; None where nothing was said and the config decides."""

    stream: Annotated[
        bool, Option("--stream", help="Stream a data set (what happens anyway without --input).", rich_help_panel=DATA)
    ] = False
    dataset: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"A data set of the Hugging Face Hub, or `demo`: this machine's own Python sources. "
            f"Default: {DEFAULT_DATASET}.",
            rich_help_panel=DATA,
        ),
    ] = None
    data_config: Annotated[
        str | None,
        Option(metavar="NAME", help="The data set's configuration, such as sample-10BT.", rich_help_panel=DATA),
    ] = None
    split: Annotated[str, Option(help="The data set's split.", rich_help_panel=DATA)] = "train"
    revision: Annotated[
        str | None,
        Option(metavar="SHA", help="The data set's commit, branch or tag. Default: the newest commit, then pinned.",
               rich_help_panel=DATA),
    ] = None  # fmt: skip
    text_column: Annotated[
        str | None,
        Option(
            metavar="NAME", help="The column or JSON field that holds the text. Default: text.", rich_help_panel=DATA
        ),
        Key("data.text_column"),
    ] = None
    max_samples: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Use only the first N documents, repeated as epochs. Default: the whole data set, for ever.",
            rich_help_panel=DATA,
        ),
    ] = None
    stream_batch_size: Annotated[
        int,
        Option(
            metavar="N",
            min=1,
            help="Kept in streaming_config.json for whoever reads it; our own reader goes by row groups.",
            rich_help_panel=DATA,
        ),
    ] = 1000
    input: Annotated[
        list[str],
        Option(
            metavar="PATH",
            help="Train on local .parquet, .jsonl(.gz/.zst) or .txt instead: a file, folder or glob. Repeatable.",
            rich_help_panel=DATA,
        ),
    ] = field(default_factory=list)
    validation: Annotated[
        list[str],
        Option(
            metavar="PATH",
            help="Evaluate on these files. Default: row groups held out of the training data. Repeatable.",
            rich_help_panel=DATA,
        ),
    ] = field(default_factory=list)
    shuffle_buffer: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Documents shuffled together.", rich_help_panel=DATA),
        Key("data.shuffle_buffer_size"),
    ] = None
    packing: Annotated[
        Packing | None,
        Option(
            help="What a token sees before it in a sequence of several documents: all, or its own document.",
            rich_help_panel=DATA,
        ),
        Key("data.packing"),
    ] = None
    loader_workers: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Threads that prepare batches; the order does not depend on them.",
            rich_help_panel=DATA,
        ),
        Key("data.num_workers"),
    ] = None

    vocab_size: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Tokens in the vocabulary to train. Default: the config's model.vocab_size.",
            rich_help_panel=TOKENIZER,
        ),
    ] = None  # fmt: skip
    tokenizer_json: Annotated[
        Path | None, Option(help="Use this tokenizer.json instead of training one.", rich_help_panel=TOKENIZER)
    ] = None
    skip_tokenizer: Annotated[
        bool,
        Option("--skip-tokenizer", help="Use the experiment's tokenizer as it is, whatever it was trained on.",
               rich_help_panel=TOKENIZER),
    ] = False  # fmt: skip
    force_retrain_tokenizer: Annotated[
        bool,
        Option("--force-retrain-tokenizer", help="Train the tokenizer even if a fitting one exists.",
               rich_help_panel=TOKENIZER),
    ] = False  # fmt: skip
    tokenizer_max_lines: Annotated[
        int,
        Option(
            metavar="N",
            min=1,
            help="Train the tokenizer on at most so many documents (and 256 MB): all their words are held in memory.",
            rich_help_panel=TOKENIZER,
        ),
    ] = DEFAULT_TOKENIZER_LINES
    tokenizer_seed: Annotated[
        int | None,
        Option(
            metavar="N",
            min=0,
            help="Train the tokenizer on every second document, chosen by this seed. Default: on the first ones.",
            rich_help_panel=TOKENIZER,
        ),
    ] = None

    hidden_size: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Width of the model.", rich_help_panel=MODEL),
        Key("model.hidden_size"),
    ] = None
    intermediate_size: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Width of the SwiGLU layer.", rich_help_panel=MODEL),
        Key("model.intermediate_size"),
    ] = None
    layers: Annotated[
        int | None, Option(metavar="N", min=1, help="Decoder blocks.", rich_help_panel=MODEL), Key("model.num_layers")
    ] = None
    heads: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Attention heads.", rich_help_panel=MODEL),
        Key("model.num_attention_heads"),
    ] = None
    kv_heads: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Key and value heads; they divide the attention heads.", rich_help_panel=MODEL),
        Key("model.num_key_value_heads"),
    ] = None
    seq_len: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Tokens in a sequence.", rich_help_panel=MODEL),
        Key("data.sequence_length"),
    ] = None

    batch_size: Annotated[
        str | None,
        Option(metavar="[N|auto]", help="Sequences in a micro-batch.", rich_help_panel=TRAINING),
        Key("data.batch_size"),
    ] = None
    grad_accum: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Micro-batches in an optimizer step.", rich_help_panel=TRAINING),
        Key("data.gradient_accumulation_steps"),
    ] = None
    steps: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Optimizer steps in all.", rich_help_panel=TRAINING),
        Key("scheduler.total_steps"),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(metavar="X", min=0, help="Peak learning rate.", rich_help_panel=TRAINING),
        Key("optimizer.learning_rate"),
    ] = None
    weight_decay: Annotated[
        float | None,
        Option(
            metavar="X", min=0, help="AdamW's decoupled decay; not on norms and embeddings.", rich_help_panel=TRAINING
        ),
        Key("optimizer.weight_decay"),
    ] = None
    warmup_steps: Annotated[
        int | None,
        Option(metavar="N", min=0, help="Steps until the learning rate's peak.", rich_help_panel=TRAINING),
        Key("scheduler.warmup_steps"),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Option(help="The learning rate after warm-up.", rich_help_panel=TRAINING),
        Key("scheduler.strategy"),
    ] = None
    precision: Annotated[
        Precision | None, Option(help="The arithmetic.", rich_help_panel=TRAINING), Key("runtime.precision")
    ] = None
    seed: Annotated[
        int | None,
        Option(metavar="N", min=0, help="Seed of the first weights and of the data's order.", rich_help_panel=TRAINING),
        Key("runtime.seed"),
    ] = None

    checkpoint_every: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Steps between checkpoints.", rich_help_panel=OFTEN),
        Key("runtime.checkpoint.every_n_steps"),
    ] = None
    max_checkpoints: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Checkpoints kept.", rich_help_panel=OFTEN),
        Key("runtime.checkpoint.max_keep"),
    ] = None
    evaluate_every: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Steps between evaluations.", rich_help_panel=OFTEN),
        Key("runtime.evaluation.every_n_steps"),
    ] = None
    eval_batches: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Batches in an evaluation.", rich_help_panel=OFTEN),
        Key("runtime.evaluation.max_batches"),
    ] = None
    log_every: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Steps between lines of the log.", rich_help_panel=OFTEN),
        Key("runtime.log_every_n_steps"),
    ] = None
    tensorboard: Annotated[
        bool | None, Option(help="Write TensorBoard's event files.", rich_help_panel=OFTEN),
        Key("runtime.logging.tensorboard"),
    ] = None  # fmt: skip

    experiment: Annotated[
        str | None,
        Option(metavar="NAME", help="Names the run's folder and its tokenizer. Default: from the data set's name.",
               rich_help_panel=RUN),
    ] = None  # fmt: skip
    run_dir: Annotated[
        Path | None, Option(help="This run's own folder. Default: runs/EXPERIMENT.", rich_help_panel=RUN)
    ] = None
    config: ConfigFile = None
    preset: Preset = None
    override: Overrides = None
    resume: Resume = None
    rebatch: Rebatch = False
    launch: LaunchMode = Launch.AUTO
    device: DeviceName = None

    def config_overrides(self) -> list[str]:
        """Return the flags that were typed as `key=value`, the explicit `--override`s last."""
        typed = []
        for name, hint in get_type_hints(Settings, include_extras=True).items():
            value = getattr(self, name)
            for key in getattr(hint, "__metadata__", ()):
                if isinstance(key, Key) and value is not None:
                    typed.append(f"{key.path}={_scalar(value)}")
        return typed + (self.override or [])

    def asked_device(self) -> str:
        """Return the device that was typed, as a flag or as an override."""
        typed = [override.partition("=") for override in self.config_overrides()]
        return ["auto", *(value for key, _, value in typed if key == "runtime.device")][-1]


def _scalar(value: object) -> str:
    """Return a flag's value as the config has it."""
    if isinstance(value, enum.Enum):
        value = value.value
    return value if isinstance(value, str) else json.dumps(value)


def takes_settings(command: Callable[[Context, Settings], None]) -> Callable[..., None]:
    """Turn a function of `Settings` into one with a parameter a flag, as Typer wants it."""
    hints = get_type_hints(Settings, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=Context)]
    for flag in fields(Settings):
        default: Any = flag.default_factory() if callable(flag.default_factory) else flag.default
        parameters.append(inspect.Parameter(flag.name, keyword, default=default, annotation=hints[flag.name]))

    def typed(context: Context, **flags: Any) -> None:
        command(context, Settings(**flags))

    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    typed.__doc__ = command.__doc__
    return typed
