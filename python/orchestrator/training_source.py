"""The text of a run: a data set that is streamed, local files, or a mixture of several of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator import _native, base_config, demo_data
from orchestrator.base_config import BaseConfig
from orchestrator.command_error import CommandError
from orchestrator.screen import amount, counted, note, step
from orchestrator.settings import DEFAULT_DATASET, DEFAULT_SPLIT, DEMO_DATASET, Settings


@dataclass(frozen=True)
class Source:
    """Where the text of a run comes from."""

    data: _native.DataSource
    shards: list[str] | None = None
    mixture: list[dict[str, Any]] | None = None


def open_source(settings: Settings, base: BaseConfig) -> Source:
    """Find the files of the data set, or those that --input or the config names."""
    if base.data["mixture"]:
        return _open_mixture(settings, base)
    shards = settings.input or ([] if settings.stream or settings.dataset else base.data["train_shards"])
    column, version = base.data["text_column"], base.data["reading_version"]
    if shards:
        split = settings.split or base.data["split"]
        source = Source(_native.DataSource.local(shards, column, version, split), base_config.absolute(shards))
    else:
        dataset = settings.dataset or DEFAULT_DATASET
        split = settings.split or DEFAULT_SPLIT
        source = Source(_stream(dataset, split, settings.data_config, settings.revision, column, version))
    _show(source.data, "data")
    return source


def _open_mixture(settings: Settings, base: BaseConfig) -> Source:
    """Find the files of every source that the config mixes, and pin their commits."""
    others = {"--split": settings.split, "--max-samples": settings.max_samples, "--input": settings.input}
    flags = streamed_flags(settings) + [flag for flag, value in others.items() if value]
    if flags:
        raise CommandError(
            f"data.mixture of the config names the training data, and so does {', '.join(flags)}: give one or the other"
        )
    sources, pinned = [], []
    mixture, version = base.data["mixture"], base.data["reading_version"]
    weights = sum(component["weight"] for component in mixture)
    for component in mixture:
        column = component["text_column"] or base.data["text_column"]
        if component["dataset"] is None:
            data = _native.DataSource.local(component["shards"], column, version, component["split"])
            pinned.append({**component, "shards": base_config.absolute(component["shards"])})
        else:
            split = component["split"] or DEFAULT_SPLIT
            config, revision = component["config"], component["revision"]
            data = _stream(component["dataset"], split, config, revision, column, version)
            pinned.append({**component, "revision": data.revision})
        sources.append((data, component["weight"]))
        _show(data, "" if len(sources) > 1 else "data", f"{component['weight'] / weights:.1%} ")
    return Source(_native.DataSource.mixture(sources), mixture=pinned)


def _stream(
    dataset: str, split: str, config: str | None, revision: str | None, column: str, reading_version: int | None
) -> _native.DataSource:
    """Find a data set by name; the demo is written where it is missing."""
    if dataset == DEMO_DATASET:
        demo_data.ensure(_native.cache_root() / DEMO_DATASET)
    return _native.DataSource.streaming(dataset, split, config, revision, column, note, reading_version)


def _show(data: _native.DataSource, label: str, weight: str = "") -> None:
    """Print what a source holds, and the files of it that are skipped."""
    revision = f" at {data.revision[:12]}" if data.revision else ""
    step(label, f"{weight}{data.name}{revision}: {counted(data.files, 'file')}, {amount(data.bytes)}")
    for message in data.notes:
        note(message)


def streamed_flags(settings: Settings) -> list[str]:
    """Return the flags that are set and concern a streamed data set."""
    flags = {
        "--stream": settings.stream,
        "--dataset": settings.dataset,
        "--data-config": settings.data_config,
        "--revision": settings.revision,
    }
    return [flag for flag, value in flags.items() if value]
