"""Flags that name the models that a run has started from, compared with the run's when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator import pretrained, training_record
from orchestrator.input_files import POINTERS
from orchestrator.settings import Settings

SECTIONS = {"init_from": "model", "lora_init_from": "lora"}
"""The sections of a config whose `init_from` a flag sets, by the flag's name."""


def problems(settings: Settings, run: dict[str, Any]) -> list[str]:
    """Return which flags name another model than the run's."""
    flags = {"init_from": settings.model_flag, "lora_init_from": "--lora-init-from"}
    return [
        problem
        for name, flag in flags.items()
        if (model := settings.keys.get(name)) is not None
        for problem in _problems(model, run[SECTIONS[name]]["init_from"], flag)
    ]


def with_own_models(settings: Settings, run: dict[str, Any]) -> Settings:
    """Return settings without `problems`, with the run's own paths in place of the names of its models."""
    return settings.with_keys(
        {name: run[section]["init_from"] for name, section in SECTIONS.items() if name in settings.keys}
    )


def _problems(model: str, own: str | None, flag: str) -> Iterator[str]:
    if own is None:
        yield f"it was started without {flag} ({model})"
    elif not _is_same(model, Path(own), flag):
        yield f"{flag} {model} is not its {own}"


def _is_same(model: str, own: Path, flag: str) -> bool:
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
