"""Flags that say how a run starts: a resumed run keeps what it was started with, so that another value is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator import _native, base_config, pretrained, run_files, tokenizer, training_record
from orchestrator.command_error import CommandError, reason
from orchestrator.config_flags import values_of
from orchestrator.input_files import POINTERS, read_bytes
from orchestrator.paths import shown
from orchestrator.settings import DEFAULT_TOKENIZER_LINES, Settings
from orchestrator.watch import checkpoints

DATA_KEYS = (
    "tokenizer.", "model.vocab_size", "data.train_shards", "data.validation_shards", "data.split", "data.max_samples",
    "data.mixture", "data.chat_template", "data.reading_version",
)  # fmt: skip
"""Keys that the data and the tokenizer fill in, in whatever a run starts from; each has a flag of its own."""
SECTIONS = {"init_from": "model", "lora_init_from": "lora"}
"""The sections of a config whose `init_from` a flag sets, by the flag's name."""
MAX_KEYS = 3
"""Keys that a message names at most."""


def check(settings: Settings, folder: Path, run: dict[str, Any], values: dict[str, Any]) -> None:
    """Refuse flags whose value is not the one that the run in `folder` was started with.

    Args:
        settings: The flags.
        folder: The run's folder.
        run: The run's config.
        values: The run's config, with the flags that set a key of it.
    """
    problems = [
        *_of_keys(settings, run, values), *_of_start(settings, values), *_of_tokenizer(settings, folder, values)
    ]  # fmt: skip
    refuse(folder, problems)


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a `CommandError` if there are any problems."""
    if problems:
        raise CommandError(
            f"{shown(folder)} keeps what it was started with when it is resumed, and {'; '.join(problems)}: leave the "
            "flag out, or start a run of another --experiment"
        )


def _of_keys(settings: Settings, run: dict[str, Any], values: dict[str, Any]) -> Iterator[str]:
    """Yield which flags and overrides change a key that a run keeps, such as a size of the model."""
    flags = {**settings.flags_of_keys(), **{key: f"--override {key}=" for key in values_of(settings.override or ())}}
    for key, was, value in _native.changes_on_resume(run, values):
        # --vocab-size is compared with what the tokenizer was asked to have.
        if key in flags and flags[key] != "--vocab-size":
            flag = flags[key] if flags[key].endswith("=") else f"{flags[key]} "
            yield f"{flag}{_text(value)} is not its {_text(was)} ({key})"


def _of_start(settings: Settings, values: dict[str, Any]) -> Iterator[str]:
    """Yield in what the config that the run is said to start from differs from the run's."""
    starts = {"--config": settings.config, "--preset": settings.preset, "--depth": settings.depth}
    for flag, start in starts.items():
        if start is None:
            continue
        ours, theirs = flat(values), flat(base_config.choose(settings).values)
        keys = [key for key in theirs if theirs[key] != ours.get(key) and not key.startswith(DATA_KEYS)]
        if keys:
            differences = ", ".join(f"{key} {theirs[key]} (the run's is {ours.get(key)})" for key in keys[:MAX_KEYS])
            others = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
            yield f"{flag} {start} has {differences}{others}"


def _of_tokenizer(settings: Settings, folder: Path, values: dict[str, Any]) -> Iterator[str]:
    """Yield which flags ask for another tokenizer than the run's."""
    own = _own_tokenizer(folder, values)
    request = training_record.read_object(own.with_name(tokenizer.MANIFEST)).get("request", {})
    size = request.get("vocab_size") or values["model"]["vocab_size"]
    if settings.vocab_size not in (None, size, values["model"]["vocab_size"]):
        yield f"--vocab-size {settings.vocab_size} is not its {size} tokens"
    if settings.tokenizer_json is not None and not _is_same(settings.tokenizer_json, own):
        yield f"--tokenizer-json {shown(settings.tokenizer_json)} is not its tokenizer, {shown(own)}"
    if settings.force_retrain_tokenizer:
        yield f"--force-retrain-tokenizer would replace its tokenizer, {shown(own)}"
    if settings.tokenizer_seed is not None and settings.tokenizer_seed != request.get("seed"):
        yield f"--tokenizer-seed {settings.tokenizer_seed} is not its {_text(request.get('seed'))}"
    lines, documents = settings.tokenizer_max_lines, request.get("max_documents")
    if lines != DEFAULT_TOKENIZER_LINES and lines != documents:
        yield f"--tokenizer-max-lines {lines} is not its {_text(documents)}"


def _own_tokenizer(folder: Path, values: dict[str, Any]) -> Path:
    """Return the run's tokenizer; where that is gone, its newest checkpoint's."""
    own = folder / run_files.TOKENIZER
    newest = None if own.exists() else checkpoints.newest(checkpoints.directory_of(folder, values))
    return own if newest is None else newest.path / own.name


def _is_same(file: Path, own: Path) -> bool:
    """Whether two tokenizers are the same file or have the same content."""
    try:
        return read_bytes(file) == read_bytes(own)
    except OSError as error:
        raise CommandError(f"cannot compare --tokenizer-json {shown(file)} with the run's: {reason(error)}") from error


def model_problems(settings: Settings, run: dict[str, Any]) -> list[str]:
    """Return which flags name another model than the run's."""
    flags = {"init_from": settings.model_flag, "lora_init_from": "--lora-init-from"}
    return [
        problem
        for name, flag in flags.items()
        if (model := settings.keys.get(name)) is not None
        for problem in _problems_of_model(model, run[SECTIONS[name]]["init_from"], flag)
    ]


def with_own_models(settings: Settings, run: dict[str, Any]) -> Settings:
    """Return settings without `model_problems`, with the run's own paths in place of the names of its models."""
    return settings.with_keys(
        {name: run[section]["init_from"] for name, section in SECTIONS.items() if name in settings.keys}
    )


def _problems_of_model(model: str, own: str | None, flag: str) -> Iterator[str]:
    if own is None:
        yield f"it was started without {flag} ({model})"
    elif not _is_same_model(model, Path(own), flag):
        yield f"{flag} {model} is not its {own}"


def _is_same_model(model: str, own: Path, flag: str) -> bool:
    """Whether a name is of a model that the run may have started from: what a name stands for may change meanwhile."""
    repository = training_record.repository_of(own)
    if repository is not None and pretrained.is_repository(model):
        name, _, revision = model.partition("@")
        is_commit = not revision or repository[1].startswith(revision)
        return name == repository[0] and (is_commit or pretrained.locate(model, flag).name == repository[1])
    folder = Path(model).expanduser()
    if folder.name in POINTERS:
        return folder.absolute().parent == own.parent
    if (of_run := pretrained.run_named(model)) is not None:
        return own.is_relative_to(of_run.absolute())
    return folder.absolute() == own or (folder.exists() and own.exists() and folder.samefile(own))


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config as values by their dotted keys."""
    values_by_key: dict[str, Any] = {}
    for name, value in values.items():
        values_by_key |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values_by_key
