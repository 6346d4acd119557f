"""The newest checkpoint of a run and the best one, as its files name them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.input_files import read_pointer

STEP = re.compile(r"step-(\d{8,20})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's directory, its step and when it was completed, in Unix seconds."""

    path: Path
    step: int
    saved_at: float


def directory_of(run: Path, config: dict[str, Any]) -> Path:
    """Return the folder of a run's checkpoints; a config of an earlier version names it by an absolute path."""
    value: Any = config
    for key in ("runtime", "checkpoint", "directory"):
        value = value.get(key) if isinstance(value, dict) else None
    configured = run / value if isinstance(value, str) else run / "checkpoints"
    return configured if configured.is_dir() else run / "checkpoints"


def named(folder: Path, pointer: str) -> Checkpoint | None:
    """Return the checkpoint that `latest` or `best` names."""
    name = None
    with contextlib.suppress(OSError, ValueError):
        # A live run may move the pointer and remove its former target after it was read.
        while (target := read_pointer(folder / pointer)) != name and STEP.fullmatch(target):
            if checkpoint := _checkpoint(folder / target):
                return checkpoint
            name = target
    return None


def newest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that `latest` names, or that of the highest step."""
    latest = named(folder, "latest")
    if latest is not None:
        return latest
    with contextlib.suppress(OSError):
        names = sorted(path.name for path in folder.iterdir() if STEP.fullmatch(path.name))
        return _checkpoint(folder / names[-1]) if names else None
    return None


def _checkpoint(path: Path) -> Checkpoint | None:
    for file in (path / "MANIFEST.json", path):
        with contextlib.suppress(OSError):
            return Checkpoint(path, int(path.name.removeprefix("step-")), file.stat().st_mtime)
    return None
