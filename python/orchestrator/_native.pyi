"""The Rust trainer: configs, data, training, generation.

Long calls run without the GIL and let Ctrl-C through between steps.
"""

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BUILT_IN_CHAT_TEMPLATES",
    "LAUNCHER",
    "ChatModel",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "DataReport",
    "DataSource",
    "DivergenceError",
    "Documents",
    "EvaluationReport",
    "Gpu",
    "Memory",
    "MemoryPlan",
    "OutOfMemoryError",
    "Reply",
    "RunConfig",
    "RunLock",
    "StepReport",
    "TokenStream",
    "Trainer",
    "TrainerError",
    "__version__",
    "cache_root",
    "changes_on_resume",
    "check_adapter_config",
    "check_profile",
    "check_sequences",
    "check_start_adapters",
    "check_threads",
    "check_time_limit",
    "check_tokenizer_json",
    "checked_adapters",
    "checked_model_config",
    "config_of_run",
    "config_to_yaml",
    "declared_commands",
    "duration",
    "environment",
    "evaluate",
    "generate",
    "gpu_state",
    "gpu_table",
    "gpus",
    "hub_proxy",
    "hub_token",
    "json_schema",
    "logits",
    "memory_plan",
    "model_directory",
    "model_file_problem",
    "model_of_run",
    "model_tokens",
    "open_device",
    "parse_config",
    "parse_count",
    "presets",
    "redacted_url",
    "run_command",
    "run_directory",
    "runs",
    "stop_with_launcher",
    "train_rank",
    "validate_data",
    "vocab_size",
]

_Path = str | PathLike[str]

BUILT_IN_CHAT_TEMPLATES: list[str]
__version__: str

class TrainerError(Exception):
    """Why a run cannot start, cannot continue, or had to end."""

    exit_code: int
    """What a command that ends with this error exits with."""

class ConfigError(TrainerError):
    """The config, or what it asks of this machine, is wrong."""

class DataError(TrainerError):
    """The data cannot be read."""

class CheckpointError(TrainerError):
    """A checkpoint cannot be saved, found or read."""

class OutOfMemoryError(TrainerError):
    """The run does not fit in memory; nothing was allocated."""

class DivergenceError(TrainerError):
    """Training diverged past the guard."""

@final
class RunConfig:
    """A run's config with everything filled in and checked."""

    @staticmethod
    def load(path: _Path, overrides: Sequence[str] = ...) -> RunConfig:
        """Read a config file for training.

        What it leaves out comes from its own folder. All problems are reported at once.

        Args:
            path: A YAML, TOML or JSON file.
            overrides: Keys to set, such as `"optimizer.learning_rate=1e-3"`.
        """

    @staticmethod
    def load_for_planning(path: _Path, overrides: Sequence[str] = ...) -> RunConfig:
        """Read a config file for commands that need neither tokenizer nor data."""

    @property
    def path(self) -> Path:
        """The config file."""

    @property
    def run_directory(self) -> Path:
        """The folder of the config, where everything of the run is written."""

    @property
    def checkpoint_directory(self) -> Path:
        """The folder of the run's checkpoints."""

    @property
    def notes(self) -> list[str]:
        """What one should know though nothing is wrong, one sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value."""

    def to_yaml(self) -> str:
        """The config as commented YAML."""

@final
class MemoryPlan:
    """What a run needs and gives; prints as `orchestrate plan` does."""

    @property
    def parameters(self) -> int:
        """Parameters on disk."""

    @property
    def bytes(self) -> int:
        """Bytes of all planned buffers."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""

@final
class StepReport:
    """What one optimizer step did."""

    @property
    def step(self) -> int:
        """Optimizer steps taken, this one included."""

    @property
    def loss(self) -> float:
        """Mean over the step's target tokens, nats, before the update."""

    @property
    def learning_rate(self) -> float:
        """The step's learning rate."""

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradients before clipping."""

    @property
    def tokens(self) -> int:
        """Target tokens trained on since the run began."""

    @property
    def tokens_per_second(self) -> float:
        """Target tokens of this step over its seconds."""

    @property
    def positions_per_second(self) -> float:
        """Positions of this step, with a target or without, over its seconds."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of all positions over the GPU's nominal BF16 peak; None where no peak is known, as on a CPU."""

    @property
    def step_seconds(self) -> float:
        """Wall time of the step."""

    @property
    def data_wait_seconds(self) -> float:
        """Part of it spent waiting for data."""

    @property
    def save_seconds(self) -> float:
        """Seconds spent saving checkpoints since the step before."""

    @property
    def evaluation_seconds(self) -> float:
        """Seconds spent evaluating since the step before, samples included."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the planned buffers."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as in metrics.jsonl."""

@final
class EvaluationReport:
    """What one evaluation found."""

    @property
    def step(self) -> int:
        """Optimizer steps taken before it."""

    @property
    def loss(self) -> float:
        """Mean over the held-out target tokens, nats."""

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of the text; None where tokens have no fixed length in bytes."""

    @property
    def tokens(self) -> int:
        """Target tokens evaluated."""

    @property
    def samples(self) -> list[tuple[str, str]]:
        """What the model made of `runtime.evaluation.prompts`, as pairs of prompt and text."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as in metrics.jsonl."""

@final
class Completion:
    """A continued text; prints as prompt and completion."""

    @property
    def prompt(self) -> str:
        """The text that was continued."""

    @property
    def completion(self) -> str:
        """What the model wrote."""

    @property
    def tokens(self) -> list[int]:
        """The same as token ids."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens written over the seconds they took."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""

@final
class RunLock:
    """The lock of a run directory, held from its making until the `with` block ends or `release` is called."""

    def __new__(cls, run: _Path) -> RunLock:
        """Take the lock of a run's folder, which is created if it does not exist."""

    def fileno(self) -> int:
        """Return the locked file's descriptor: a trainer that gets it as standard input holds the lock as well."""

    def release(self) -> None:
        """Give it up; a trainer that holds it as well keeps it."""

    def __enter__(self) -> RunLock: ...
    def __exit__(self, _kind: object, _value: object, _traceback: object) -> None: ...

@final
class Trainer:
    """A model in training. Iterating takes one optimizer step a turn.

    A `for` loop ends when the config's steps are taken or the data have ended. It neither saves nor evaluates: call
    `save` and `evaluate` where you want that, or use `orchestrate train`, which does both as the config says.

    Files of the run that a full disk does not take, and old checkpoints that cannot be removed, are told as
    `RuntimeWarning` and do not stop it. A process that was forked from the one that made it cannot use it.
    """

    def __new__(cls, config: RunConfig) -> Trainer:
        """Start a new run in the config's folder, whose lock is held while this object lives."""

    @staticmethod
    def resume(
        run: _Path, overrides: Sequence[str] = ..., checkpoint: _Path | None = None, rebatch: bool = False
    ) -> Trainer:
        """Resume a run, bit for bit as if it had never stopped.

        Args:
            run: The run's folder, or its config file.
            overrides: Keys to set, where they may change.
            checkpoint: The checkpoint directory to resume from; None for the newest intact one.
            rebatch: Compute steps with the config's micro-batch, accumulation and recompute mode, not the checkpoint's:
                the weights then agree with those of an uninterrupted run up to rounding only.
        """

    def __iter__(self) -> Iterator[StepReport]: ...
    def __next__(self) -> StepReport: ...
    @property
    def step(self) -> int:
        """Optimizer steps taken since the run began."""

    @property
    def notes(self) -> list[str]:
        """What one should know about how it started, one sentence each."""

    @property
    def utilization(self) -> dict[str, Any] | None:
        """The newest sample of what the run takes of its machine, as in metrics.jsonl; None before the first."""

    @property
    def finished(self) -> str | None:
        """Why iterating is over, such as `all steps are done`; None while there are steps left."""

    def take_advice(self) -> list[str]:
        """What was found since the last call to hold the run back, one sentence each."""

    def memory_plan(self) -> MemoryPlan:
        """The buffers it holds."""

    def evaluate(self) -> EvaluationReport | None:
        """Measure the loss on the held-out text; None where there is none."""

    def save(self) -> Path:
        """Write a checkpoint and return its directory."""

    def generate(
        self, prompt: str, *, max_tokens: int = 128, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0,
        seed: int = 0,
    ) -> Completion:  # fmt: skip
        """Continue a text with the weights as they are."""

@final
class TokenStream:
    """The batches of a run, one optimizer step's sequences at a time.

    Iterating gives `(inputs, targets)`, two arrays of shape [sequences_per_step, sequence_length]; a target of -100
    counts for nothing. They are the same whatever `data.packing` is: with `documents` a document begins at each
    `<|endoftext|>` of the inputs.
    """

    def __new__(cls, config: RunConfig, state: dict[str, Any] | None = None, stage: int = 0) -> TokenStream:
        """Start at the beginning, or exactly where `state` says, with the sequences of one of the config's stages."""

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]: ...
    def __next__(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
    def state(self) -> dict[str, Any]:
        """Where the next batch starts, as a small JSON-able dict."""

@final
class ChatModel:
    """A model that answers in conversations. The keys and values of a conversation are kept from turn to turn."""

    def __new__(
        cls,
        checkpoint: _Path,
        *,
        base_model: _Path | None = None,
        chat_template: _Path | None = None,
        date: str | None = None,
        device: str = "auto",
    ) -> ChatModel:
        """Read a model and its chat template.

        Args:
            checkpoint: A checkpoint, or any model in Hugging Face's format.
            base_model: Where the model of LoRA adapters is, if not where they say.
            chat_template: A template's file, or the name of a built-in one, instead of the model's.
            date: The day that templates take for today where the model's run has pinned none, `2026-01-31`.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
        """

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends the assistant's turns with a token, at which answers end."""

    @property
    def context(self) -> int:
        """Tokens that a conversation may have."""

    def reply(
        self,
        messages: list[dict[str, str]],
        on_text: Callable[[str], object],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Reply:
        """Answer a conversation.

        Args:
            messages: Each with `role` and `content`. Text in them never becomes a special token.
            on_text: Called with the answer as it grows.
            max_tokens: Tokens to write at most.
            temperature: 0 takes the likeliest token each time.
            top_k: Choose among the k likeliest tokens; 0 for all.
            top_p: Choose among the likeliest tokens that make up this probability.
            seed: The same seed writes the same text.
        """

@final
class Reply:
    """An answer."""

    @property
    def text(self) -> str:
        """Its text."""

    @property
    def tokens(self) -> int:
        """Its tokens."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the conversation before it."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "context"]:
        """Why it ended: the model ended its turn, `max_tokens`, or a full context."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""

@final
class DataSource:
    """A data set whose files are known."""

    @staticmethod
    def streaming(
        dataset: str, split: str = "train", config: str | None = None, revision: str | None = None,
        text_column: str = "text", on_wait: Callable[[str], object] | None = None, reading_version: int | None = None,
    ) -> DataSource:  # fmt: skip
        """Find a data set of the Hugging Face Hub, or `demo` in the cache folder, and pin its commit.

        Args:
            dataset: Its name.
            split: Its split.
            config: Its configuration.
            revision: Its commit, branch or tag.
            text_column: The column or field that holds the text.
            on_wait: Called with a line about what is waited for while the Hub fails.
            reading_version: The version of the rules by which files become documents (`data.reading_version`); the
                newest if None.
        """

    @staticmethod
    def local(
        patterns: Sequence[str], text_column: str = "text", reading_version: int | None = None,
        split: str | None = None,
    ) -> DataSource:  # fmt: skip
        """Find local files: paths, folders and globs, relative to the current folder.

        Args:
            patterns: The paths, folders and globs.
            text_column: The column or field that holds the text.
            reading_version: The version of the rules by which files become documents (`data.reading_version`); the
                newest if None.
            split: The split of folders; by default `train`, or without one all files in no validation or test split.
        """

    @staticmethod
    def mixture(components: Sequence[tuple[DataSource, float]]) -> DataSource:
        """Mix sources with their weights, which are their shares of the text."""

    @property
    def name(self) -> str:
        """The data set's name, or the patterns."""

    @property
    def revision(self) -> str | None:
        """The commit that is read; None for local files and mixtures."""

    @property
    def files(self) -> int:
        """How many files there are."""

    @property
    def bytes(self) -> int:
        """Their size together."""

    @property
    def notes(self) -> list[str]:
        """What was left out of the listing and why, one sentence each."""

    def documents(self, max_samples: int | None = None, on_wait: Callable[[str], object] | None = None) -> Documents:
        """Iterate over the documents in listing order, at most `max_samples`.

        Those of a mixture come in the proportions of its weights, each source from its beginning again until all have
        been read. `on_wait` is called with a line about what is waited for while the Hub fails.
        """

@final
class Documents:
    """Documents in listing order."""

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def describe_skipped(self) -> str | None:
        """Say how many rows were skipped so far, by reason; None if there are none."""

    def take_notices(self) -> list[str]:
        """Return the notices of skipped rows and corrupted files since the last call, one sentence each."""

@final
class DataReport:
    """What was proven about a run's data; prints as `orchestrate validate-data` does."""

    @property
    def problems(self) -> list[str]:
        """What does not fit; empty where every document was used exactly once."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""

@final
class Gpu:
    """An NVIDIA GPU, as the driver lists it."""

    @property
    def ordinal(self) -> int:
        """Its number, as in `cuda:0`."""

    @property
    def name(self) -> str:
        """As the driver calls it."""

    @property
    def uuid(self) -> str:
        """As `nvidia-smi -L` writes it."""

    @property
    def total_bytes(self) -> int:
        """Its memory."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""

    @property
    def refusal(self) -> str | None:
        """Why nothing is trained on it, in a sentence; None where it can be."""

def hub_token() -> tuple[str, str] | None:
    """Return where the Hub's access token comes from, and what to do if it is not accepted; None without one."""

def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: `15 d 7 h`, `3 min 20 s`, `8 s`."""

def redacted_url(url: str) -> str:
    """Return a URL as messages show it: without user and password, and without its query.

    The query may hold a signature or a key.
    """

def hub_proxy(url: str) -> str | None:
    """Return the proxy by which this process reaches a URL, as messages name it."""

def gpus() -> list[Gpu]:
    """Return the GPUs that the driver lists, at least one; a `ConfigError` says what is missing. None is opened."""

def gpu_state(uuid: str) -> dict[str, Any]:
    """Return what NVML says of the GPU with this UUID; None for what the GPU does not tell.

    Keys: `pcie`, `power`, `persistence`, `clocks`, `ecc`, `other_processes`. A `TrainerError` says why NVML does not
    answer.

    Args:
        uuid: `Gpu.uuid`.
    """

def open_device(device: str) -> dict[str, Any]:
    """Open a device as a run would, and tell what it is and what of its memory is free.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

def check_threads(threads: int | None, workers: int | str) -> None:
    """Refuse more threads than this machine can use or the system starts.

    Args:
        threads: Those that compute; None for what `RAYON_NUM_THREADS` says, else one per core.
        workers: Those that read and tokenise.
    """

def check_profile(steps: str, total_steps: int | None) -> None:
    """Refuse `--profile` steps that are none, or that a new run does not take.

    Args:
        steps: Such as `3`, `10-12` or `10..13`.
        total_steps: Those of the run; None where the config does not say.
    """

def check_sequences(sequences: int, ranks: int) -> None:
    """Refuse a number of ranks that cannot share the sequences of a step equally."""

def check_time_limit(limit: str) -> None:
    """Refuse a `--time-limit` that is not a span of time, such as `11h50m`."""

def environment() -> dict[str, Any]:
    """Return what this build is and what it runs on, as environment.json has it."""

@final
class Memory:
    """A buffer of the trainer, which `numpy.asarray` or `torch.as_tensor` shares; of bf16 the bits, as uint16."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Of a buffer in the machine's memory; `AttributeError` on a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Of a buffer on a GPU, with the stream that orders its use; `AttributeError` on a CPU."""

class _Exchange(Protocol):
    """What connects the ranks of a run; see `orchestrator.distributed.exchange`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def connect_gpus(self, gpu: int, stream: int) -> str | None: ...
    def begin_swap(self, sent: list[tuple[int, Memory]], received: list[tuple[int, Memory]]) -> None: ...
    def end_swap(self) -> None: ...
    def sum(self, numbers: list[float]) -> list[float]: ...
    def gather(self, text: str) -> list[str]: ...

def train_rank(words: Sequence[str], exchange: _Exchange) -> int:
    """Train as one of several ranks, and return the exit code.

    Args:
        words: The command line of `train` without its name.
        exchange: What connects the ranks.
    """

def run_command(
    words: Sequence[str], write: Callable[[str], object], is_terminal: bool = False, lock: RunLock | None = None
) -> int:
    """Run a command of the trainer's program in this process, and return its exit code.

    A training run that Ctrl-C or SIGTERM has stopped and that was saved returns 130 or 143; errors are exceptions.

    Args:
        words: The command line after the program's name.
        write: Takes the answer, piece by piece; an `OSError` that it raises ends the command.
        is_terminal: Whether the answer goes to a terminal, which would obey control characters.
        lock: The lock of the run's folder, if it is taken already and the command is `train`.
    """

LAUNCHER: str
"""The environment variable that names the process that launched a trainer, and when that process started."""

def stop_with_launcher() -> bool:
    """Let the system send this process SIGTERM when `orchestrate`, which launched it, ends.

    Returns:
        False if it has ended already.
    """

def declared_commands() -> list[dict[str, Any]]:
    """Return what each command of the trainer's program takes, as its command line declares it."""

def evaluate(
    checkpoint: _Path,
    input: Sequence[str] = ...,
    text_column: str = "text",
    max_sequences: int | None = None,
    device: str = "auto",
) -> EvaluationReport:
    """Measure a model's loss on its run's held-out text, or on files of one's own.

    Args:
        checkpoint: A checkpoint, a run's folder, or any Llama model in Hugging Face's format.
        input: Files, folders or globs; empty for what the run held out.
        text_column: The column or field of `input` that holds the text.
        max_sequences: Sequences to evaluate at most.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

def generate(
    checkpoint: _Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    special: bool = False,
) -> Completion:
    """Continue a text with a model.

    Args:
        checkpoint: A checkpoint, a run's folder, or any Llama model in Hugging Face's format.
        prompt: The text to continue; an empty one starts a new text.
        max_tokens: Tokens to write at most.
        temperature: 0 takes the likeliest token each time.
        top_k: Choose among the k likeliest tokens; 0 for all.
        top_p: Choose among the likeliest tokens that make up this probability.
        seed: The same seed writes the same text.
        device: `auto` (a GPU that takes the model and has room for it, else the CPU), `cpu`, `cuda` or `cuda:N`.
        special: Take special tokens that the prompt spells as tokens.
    """

def validate_data(run: _Path, replay: Sequence[int] = ...) -> DataReport:
    """Prove from a run's ledger that every document of an epoch was used exactly once.

    Args:
        run: The run's folder.
        replay: Steps whose batches are made again as well, and compared with what they were trained on.
    """

def logits(
    checkpoint: _Path, tokens: Sequence[int], *, prompt_tokens: int = 0, device: str = "auto"
) -> NDArray[np.float32]:
    """Return the logits behind each token, `[tokens, vocabulary]`.

    Args:
        checkpoint: A checkpoint, a run's folder, or a model in Hugging Face's format.
        tokens: Token ids.
        prompt_tokens: How many of the first tokens pass through the model together, as a prompt does, which is faster;
            the others pass one by one, as generated tokens do.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

def model_directory(checkpoint: _Path | None = None, experiment: str | None = None) -> Path:
    """Return the directory of a model; the files of a checkpoint are verified.

    Args:
        checkpoint: A checkpoint, a folder of checkpoints, a run's folder, or a model in Hugging Face's format.
        experiment: Instead, an experiment, whose newest intact checkpoint is taken.
    """

def model_file_problem(path: _Path) -> str | None:
    """Return what a file is that is named in place of a model's folder, and what to name instead; None for no file.

    Args:
        path: What was named.
    """

def run_directory(name: _Path | None = None) -> Path:
    """Return the directory of a run: of the newest one without a name, and then stderr says which.

    Args:
        name: An experiment, or a path: a run's directory, a checkpoint of it, its config.
    """

def config_of_run(name: _Path | None = None) -> Path:
    """Return the config of a run, named as for `run_directory`; a config that is named need not be a run's."""

def model_of_run(name: _Path | None = None) -> Path:
    """Return the directory with a run's model, named as for `run_directory`; it may be a model of no run."""

def runs() -> list[Path]:
    """Return the directories of all runs, the one that was written to last first."""

def parse_count(text: str) -> int:
    """Return a count such as 2000000, 10k, 1e3 or 20B; raise a `ValueError` for anything else."""

def checked_model_config(directory: _Path, read_weights: bool = True) -> str:
    """Return the `config.json` of a model with every key, if training can start from the model.

    Its weights are checked: all of them are there and of the right shape.

    Args:
        directory: A checkpoint, or a model in Hugging Face's format.
        read_weights: Whether every number is read too, and has to be finite. Those of a checkpoint never are: they have
            hashes.
    """

def check_adapter_config(file: _Path, config: dict[str, Any]) -> None:
    """Raise a `ConfigError` for adapters that compute something else than plain LoRA.

    Args:
        file: The adapter_config.json, for the message.
        config: Its content.
    """

def check_start_adapters(directory: _Path, model: _Path) -> None:
    """Raise an error unless training can start from adapters beside a model.

    They were trained beside it, as far as they say, and their weights are whole, of the right shapes and finite.

    Args:
        directory: The adapters.
        model: Their base model.
    """

def checked_adapters(directory: _Path, base_model: _Path | None = None) -> dict[str, Any]:
    """Compare adapters with the model that they belong to.

    Keys: `base_model` (its directory), `is_recorded` (whether the adapters say what its files are, which were then
    compared), `rank`, and `scale`, what the product of an adapter's two matrices is multiplied by.

    Args:
        directory: A checkpoint of a LoRA run, or a directory of peft.
        base_model: Where the model is, if not where the adapters say.
    """

def model_tokens(directory: _Path, base_model: _Path | None = None, date: str | None = None) -> dict[str, Any]:
    """Return the tokenizer of a model with its special tokens, as training and `chat` use it.

    Keys: `tokenizer_json` (its content, with the tokens that the files beside it add), `roles` (tokens by role, such as
    `bos_token`), `adds_bos` (`add_bos_token`, or None), `templates` (chat templates by name), `stop_tokens` (the ids
    that end a text, the first of which ends a document), `end_of_turn` (the id that ends the assistant's turn, or
    None), `conversations_start_with_bos` (whether the chat template starts with the BOS token; None without one that
    can be used) and `left_out` (tokens for which the model has no embedding).

    Args:
        directory: A checkpoint, or a model in Hugging Face's format.
        base_model: The model of adapters, if it is not where they say.
        date: What stands for today in a template that names the date, `2026-01-31`.
    """

def gpu_table() -> dict[str, dict[str, Any]]:
    """Return the GPUs that a run can be planned for: what each holds and how fast it is, by its name for `--gpu`."""

def memory_plan(config: RunConfig) -> MemoryPlan:
    """Return what a run needs in memory, disk and arithmetic, before anything is allocated.

    It is planned for the GPU that `runtime.device` names or finds, else for an RTX 5090 if the run is meant for a
    GPU, else for this machine's CPU.
    """

def parse_config(
    text: str,
    format: Literal["yaml", "toml", "json"] = "yaml",
    overrides: Sequence[str] = ...,
    file: _Path | None = None,
    flags: dict[str, str] = ...,
) -> dict[str, Any]:
    """Check a config's text with overrides, and return every key with its value.

    No file is looked at but the `config.json` of `model.init_from`.

    Args:
        text: The config.
        format: How it is written.
        overrides: Keys to set.
        file: What messages call it.
        flags: The flag that was typed for a key, such as `--seed` for `runtime.seed`: what messages call its override.
    """

def config_to_yaml(config: dict[str, Any]) -> str:
    """Return a config's values as YAML with every key and what it means."""

def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config."""

def presets() -> dict[str, str]:
    """Return the shipped configs: the text of each by its name."""

def changes_on_resume(run: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the keys that must not change on resume and that differ, with both values.

    Args:
        run: The values of the run's config.
        config: The values to resume it with.
    """

def vocab_size(tokenizer_json: _Path) -> int:
    """Return the size of the vocabulary of a `tokenizer.json`: one more than the highest token id."""

def check_tokenizer_json(path: _Path) -> None:
    """Refuse a `tokenizer.json` that the library tokenizers cannot read."""

def cache_root() -> Path:
    """Return the folder for what can be made again."""
