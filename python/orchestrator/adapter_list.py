"""`orchestrate export --list`: the LoRA adapters of a run, or of a folder of peft's directories."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator import training_record
from orchestrator.adapters import ADAPTER_CONFIG, has_adapters, named_base
from orchestrator.command_error import CommandError
from orchestrator.input_files import POINTERS, read_pointer
from orchestrator.model_source import Source
from orchestrator.paths import Roots, shown
from orchestrator.screen import table
from orchestrator.terminal import result

HEADS = ("name", "step", "rank", "evaluation loss", "base", "")


def run(source: Source) -> None:
    """Print a line per directory of adapters, oldest first."""
    folder = source.checkpoint or Roots.from_environment().location(source.experiment or "", None).folder
    if not folder.is_dir():
        raise CommandError(f"there is no folder {shown(folder)}")
    folders = _directories(folder)
    if not folders:
        raise CommandError(f"there are no LoRA adapters in {shown(folder)}: no directory there has {ADAPTER_CONFIG}")
    # A live run removes old checkpoints meanwhile, whose files then read as empty.
    rows = [HEADS, *(row for folder, row in [(folder, _row(folder)) for folder in folders] if folder.is_dir())]
    result(table(rows))


def _directories(folder: Path) -> list[Path]:
    """Return the adapters in a folder: itself, those of its checkpoints if it is a run's, or its subfolders."""
    if has_adapters(folder):
        return [folder]
    parent = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    folders = [path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted((path for path in folders if has_adapters(path)), key=_order)


def _order(folder: Path) -> tuple[int, str]:
    return training_record.read_object(folder / "trainer_state.json").get("step", 0), folder.name


def _row(folder: Path) -> tuple[str, ...]:
    config = training_record.read_object(folder / ADAPTER_CONFIG)
    state = training_record.read_object(folder / "trainer_state.json")
    loss = state.get("evaluation_loss")
    repository = training_record.repository_of(Path(named_base(folder)))
    base = f"{repository[0]}@{repository[1][:12]}" if repository else named_base(folder)
    marks = [mark for mark in POINTERS if _pointer(folder.parent / mark) == folder.name]
    return (
        folder.name, str(state.get("step", "")), str(config.get("r", "")), "" if loss is None else f"{loss:.4f}",
        os.path.relpath(base) if Path(base).is_relative_to(Path.cwd()) else base, " ".join(marks),
    )  # fmt: skip


def _pointer(path: Path) -> str | None:
    """Return the checkpoint that `latest` or `best` names."""
    try:
        return read_pointer(path)
    except (OSError, ValueError):
        return None
