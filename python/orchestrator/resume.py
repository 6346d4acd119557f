"""Resuming a run: what is typed about its data and its start must be what it was started with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from orchestrator import _native, base_config, resume_flags, run_files
from orchestrator.command_error import CommandError, reason
from orchestrator.input_files import read_text
from orchestrator.paths import Roots, RunLocation, shown
from orchestrator.settings import Settings

COMMIT = re.compile(r"[0-9a-f]{7,40}")
LATEST = "latest"


def locate(settings: Settings, roots: Roots) -> RunLocation | None:
    """Return the run that `--resume` names, or the newest one where nothing else names a run; None where a flag does.

    A checkpoint after `--resume` names its run, and stays the checkpoint to resume from.
    """
    if settings.experiment or settings.run_dir or settings.input or settings.dataset or settings.resume is None:
        return None
    if settings.resume == LATEST:
        return roots.location_of(_native.run_directory())
    folder, model = _native.run_directory(settings.resume), _native.model_of_run(settings.resume)
    settings.resume = LATEST if model == folder else str(model)
    return roots.location_of(folder)


def check(settings: Settings, folder: Path) -> None:
    """Refuse flags that the config's rules forbid, or that name other data than the run in `folder` is trained on."""
    streaming = run_files.read_streaming_config(folder)
    config = folder / run_files.TRAINING_CONFIG
    try:
        text = read_text(config)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {shown(config)}: {reason(error)}") from error
    run = _native.parse_config(text, "yaml", [], config)
    resume_flags.check_models(settings, folder, run)
    values = _native.parse_config(text, "yaml", settings.config_overrides(), config, settings.flags_of_keys())
    resume_flags.check(settings, folder, run, values)
    trained_on = streaming["dataset"] if streaming else "what its training.yaml names"
    for flag, typed, of_run in _typed(settings, streaming, values["data"]):
        if typed == of_run:
            continue
        raise CommandError(
            f"{shown(folder)} trains on {trained_on}{_kept(flag, of_run)}, so it cannot be resumed with {flag} "
            f"{_text(typed)}: leave the flag out, or start a run of another --experiment"
        )


def _typed(
    settings: Settings, streaming: dict[str, Any] | None, data: dict[str, Any]
) -> list[tuple[str, object, object]]:
    """Return each flag about the data that was typed, with its value and the run's."""
    streamed = streaming or {}
    flags = [
        ("--dataset", settings.dataset, streamed.get("dataset")),
        ("--data-config", settings.data_config, streamed.get("config")),
        (
            "--max-samples",
            settings.max_samples,
            data["max_samples"] if streaming is None else streaming.get("max_samples"),
        ),
        ("--input", base_config.absolute(settings.input) or None, data["train_shards"]),
        ("--validation", base_config.absolute(settings.validation) or None, data["validation_shards"]),
    ]
    if streaming is None:
        flags += [
            ("--stream", settings.stream or None, None),
            ("--revision", settings.revision, None),
            ("--split", settings.split, data["split"]),
        ]
    else:
        revision = settings.revision and _commit(settings.revision, streaming)
        flags += [
            ("--split", settings.split, streaming.get("split")),
            ("--stream-batch-size", settings.stream_batch_size, streaming.get("stream_batch_size")),
            ("--text-column", settings.keys.get("text_column"), streaming.get("text_column", "text")),
            ("--revision", revision, streaming.get("revision")),
        ]
    return [(flag, typed, of_run) for flag, typed, of_run in flags if typed is not None]


def _commit(revision: str, streaming: dict[str, Any]) -> str:
    """Return the commit that a revision names; the Hub is asked about branches and tags."""
    pinned = streaming.get("revision")
    if pinned is None or COMMIT.fullmatch(revision):
        return pinned if pinned and pinned.startswith(revision) else revision
    column = streaming.get("text_column", "text")
    source = _native.DataSource.streaming(
        streaming["dataset"], streaming["split"], streaming.get("config"), revision, column
    )
    return source.revision or revision


def _kept(flag: str, of_run: object) -> str:
    """Return with which value of the flag the run was started; empty for `--dataset`, which the message names."""
    if flag == "--dataset":
        return ""
    return f" with {flag} {_text(of_run)}" if of_run not in (None, []) else f" without {flag}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
