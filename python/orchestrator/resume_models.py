"""Flags that name the models that a run has started from, compared with the run's when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator import pretrained, training_record
from orchestrator.input_files import POINTERS
from orchestrator.settings import Settings


def problems(settings: Settings, run: dict[str, Any]) -> list[str]:
    """Return which flags name another model than the run's; of the others, put the run's own path in their place."""
    flags = {"init_from": ("model", settings.model_flag), "lora_init_from": ("lora", "--lora-init-from")}
    return [
        problem for name, (section, flag) in flags.items() for problem in _problem(settings, run, name, section, flag)
    ]


def _problem(settings: Settings, run: dict[str, Any], name: str, section: str, flag: str) -> Iterator[str]:
    typed, own = settings.keys.get(name), run[section]["init_from"]
    if typed is None:
        return
    if own is not None and _is_same(typed, Path(own), flag):
        settings.keys[name] = own
        return
    yield f"{flag} {typed} is not its {own}" if own is not None else f"it was started without {flag} ({typed})"


def _is_same(typed: str, own: Path, flag: str) -> bool:
    """Whether a model is named from which the run may have started: what a name stands for may change meanwhile."""
    repository = training_record.repository_of(own)
    if repository is not None and pretrained.is_repository(typed):
        name, _, revision = typed.partition("@")
        is_commit = not revision or repository[1].startswith(revision)
        return name == repository[0] and (is_commit or pretrained.locate(typed, flag).name == repository[1])
    folder = Path(typed).expanduser()
    if folder.name in POINTERS:
        return folder.absolute().parent == own.parent
    if (of_run := pretrained.run_named(typed)) is not None:
        return own.is_relative_to(of_run.absolute())
    return folder.absolute() == own or (folder.exists() and own.exists() and folder.samefile(own))
