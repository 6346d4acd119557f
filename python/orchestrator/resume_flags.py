"""Flags that say how a run starts: a resumed run keeps what it was started with, so that another value is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator import base_config, run_files, tokenizer, training_record
from orchestrator.command_error import CommandError
from orchestrator.input_files import read_bytes
from orchestrator.paths import shown
from orchestrator.settings import DEFAULT_TOKENIZER_LINES, Settings

FROM_THE_DATA = (
    "tokenizer.", "model.vocab_size", "data.train_shards", "data.validation_shards", "data.split", "data.max_samples",
    "data.mixture", "data.chat_template", "data.reading_version",
)  # fmt: skip
"""Keys that the data and the tokenizer fill in, in whatever a run starts from; each has a flag of its own."""
NAMED_KEYS = 3
"""Keys that a message names at most."""


def check(settings: Settings, folder: Path, values: dict[str, Any]) -> None:
    """Refuse flags whose value is not the one that the run in `folder` was started with.

    Args:
        settings: The flags.
        folder: The run's folder.
        values: The run's config, with the flags that set a key of it.
    """
    problems = [*_of_start(settings, values), *_of_tokenizer(settings, folder, values)]
    if problems:
        raise CommandError(
            f"{shown(folder)} keeps what it was started with when it is resumed, and {'; '.join(problems)}: leave the "
            "flag out, or start a run of another --experiment"
        )


def _of_start(settings: Settings, values: dict[str, Any]) -> Iterator[str]:
    """Yield in what the config that the run is said to start from differs from the run's."""
    starts = {"--config": settings.config, "--preset": settings.preset, "--depth": settings.depth}
    for flag, typed in starts.items():
        if typed is None:
            continue
        ours, theirs = _flat(values), _flat(base_config.choose(settings).values)
        changed = [key for key in theirs if theirs[key] != ours.get(key) and not key.startswith(FROM_THE_DATA)]
        if changed:
            named = ", ".join(f"{key} {theirs[key]} (the run's is {ours.get(key)})" for key in changed[:NAMED_KEYS])
            others = f" and {len(changed) - NAMED_KEYS} more" if len(changed) > NAMED_KEYS else ""
            yield f"{flag} {typed} has {named}{others}"


def _of_tokenizer(settings: Settings, folder: Path, values: dict[str, Any]) -> Iterator[str]:
    """Yield which flags ask for another tokenizer than the run's."""
    own = folder / run_files.TOKENIZER
    request = training_record.read_object(own.with_name(tokenizer.MANIFEST)).get("request", {})
    size = request.get("vocab_size") or values["model"]["vocab_size"]
    if settings.vocab_size not in (None, size, values["model"]["vocab_size"]):
        yield f"--vocab-size {settings.vocab_size} is not its {size} tokens"
    if settings.tokenizer_json is not None and not _is_same(settings.tokenizer_json, own):
        yield f"--tokenizer-json {shown(settings.tokenizer_json)} is not its tokenizer, {shown(own)}"
    if settings.force_retrain_tokenizer:
        yield f"--force-retrain-tokenizer would replace its tokenizer, {shown(own)}"
    if settings.tokenizer_seed is not None and settings.tokenizer_seed != request.get("seed"):
        yield f"--tokenizer-seed {settings.tokenizer_seed} is not its {_said(request.get('seed'))}"
    lines, documents = settings.tokenizer_max_lines, request.get("max_documents")
    if lines != DEFAULT_TOKENIZER_LINES and lines != documents:
        yield f"--tokenizer-max-lines {lines} is not its {_said(documents)}"


def _is_same(typed: Path, own: Path) -> bool:
    """Whether two tokenizers are the same file or have the same content."""
    try:
        return read_bytes(typed) == read_bytes(own)
    except OSError as error:
        raise CommandError(f"cannot read --tokenizer-json {shown(typed)}: {error.strerror}") from error


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config as values by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
