"""Resuming a run: flags about its data and its start must be those that it was started with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from orchestrator import _native, base_config, resume_flags, run_files
from orchestrator.command_error import CommandError
from orchestrator.input_files import read_text, readable
from orchestrator.launch import Job
from orchestrator.paths import Roots, RunLocation, shown
from orchestrator.settings import Settings

COMMIT = re.compile(r"[0-9a-f]{7,40}")
LATEST = "latest"


def resolve(settings: Settings, checkpoint: str, roots: Roots) -> tuple[Job, RunLocation]:
    """Return the run to resume as its own files describe it, with the flags as overrides, and where it is.

    Flags with which it cannot be resumed are refused.

    Args:
        settings: The flags, which do not contradict each other.
        checkpoint: The value of `--resume`.
        roots: The folders of runs and tokenizers.
    """
    location, checkpoint = _locate(settings, checkpoint, roots)
    config = location.folder / run_files.TRAINING_CONFIG
    if not config.is_file():
        raise CommandError(_no_such_run(location, roots))
    job = Job(
        config, _overrides(settings, location.folder), checkpoint, settings.rebatch, settings.accept_changed_data,
        settings.time_limit, settings.profile, ranks=settings.nproc,
    )  # fmt: skip
    return job, location


def _locate(settings: Settings, checkpoint: str, roots: Roots) -> tuple[RunLocation, str]:
    """Return the run that a flag names, else the one that `--resume` does, and the checkpoint to resume from.

    A checkpoint after `--resume` names its run, and stays the checkpoint to resume from. `latest` alone is the newest
    run.
    """
    if settings.experiment or settings.run_dir or settings.input or settings.dataset:
        return roots.location(settings.experiment_name, settings.run_dir), checkpoint
    if checkpoint == LATEST:
        return roots.location_of(_native.run_directory()), LATEST
    folder, model = _native.run_directory(checkpoint), _native.model_of_run(checkpoint)
    return roots.location_of(folder), LATEST if model == folder else str(model)


def _no_such_run(location: RunLocation, roots: Roots) -> str:
    problem = f"there is no run to resume in {shown(location.folder)}: it has no {run_files.TRAINING_CONFIG}"
    experiments = sorted(path.parent.name for path in roots.runs.glob(f"*/{run_files.TRAINING_CONFIG}"))
    if not location.is_usual or not experiments:
        return f"{problem}; start it without --resume"
    return f"{problem}; the experiments there are: {', '.join(experiments)}"


def _overrides(settings: Settings, folder: Path) -> list[str]:
    """Return the flags as overrides of the config of the run in `folder`.

    Refuses those that the config's rules forbid, or that name other data than the run is trained on.
    """
    streaming = run_files.read_streaming_config(folder)
    config = folder / run_files.TRAINING_CONFIG
    with readable(shown(config)):
        text = read_text(config)
    run = _native.parse_config(text, "yaml", [], config)
    resume_flags.refuse(folder, resume_flags.model_problems(settings, run))
    settings = resume_flags.with_own_models(settings, run)
    overrides = settings.config_overrides()
    values = _native.parse_config(text, "yaml", overrides, config, settings.flags_of_keys())
    resume_flags.check(settings, folder, run, values)
    data = streaming["dataset"] if streaming else "what its training.yaml names"
    for flag, value, of_run in _data_flags(settings, streaming, values["data"]):
        if value == of_run:
            continue
        raise CommandError(
            f"{shown(folder)} trains on {data}{_value_of_run(flag, of_run)}, so it cannot be resumed with {flag} "
            f"{_text(value)}: leave the flag out, or start a run of another --experiment"
        )
    return overrides


def _data_flags(
    settings: Settings, streaming: dict[str, Any] | None, data: dict[str, Any]
) -> list[tuple[str, object, object]]:
    """Return each flag about the data that has a value, with its value and the run's."""
    streamed = streaming or {}
    flags = [
        ("--dataset", settings.dataset, streamed.get("dataset")),
        ("--data-config", settings.data_config, streamed.get("config")),
        ("--max-samples", settings.max_samples, (data if streaming is None else streaming).get("max_samples")),
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
    return [(flag, value, of_run) for flag, value, of_run in flags if value is not None]


def _commit(revision: str, streaming: dict[str, Any]) -> str:
    """Return the commit that a revision names; the Hub is asked about branches and tags."""
    commit = streaming.get("revision")
    if commit is None or COMMIT.fullmatch(revision):
        return commit if commit and commit.startswith(revision) else revision
    column = streaming.get("text_column", "text")
    source = _native.DataSource.streaming(
        streaming["dataset"], streaming["split"], streaming.get("config"), revision, column
    )
    return source.revision or revision


def _value_of_run(flag: str, of_run: object) -> str:
    """Return with which value of the flag the run was started; empty for `--dataset`, which the message names."""
    if flag == "--dataset":
        return ""
    return f" with {flag} {_text(of_run)}" if of_run not in (None, []) else f" without {flag}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
