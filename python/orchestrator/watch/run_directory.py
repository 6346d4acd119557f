"""The directory of a run: found by a name or a path, followed when it is moved, replaced or removed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.command_error import CommandError
from orchestrator.paths import EXPERIMENT, Roots, shown

CONFIG = "training.yaml"
METRICS = "metrics.jsonl"
LOCK = ".trainer.lock"
RUN_FILES = (CONFIG, "resolved_config.json", METRICS, LOCK)
"""A directory that holds one of these is a run's."""


def find(named: str | None, roots: Roots) -> Path:
    """Return the run directory of an experiment, of a path to it or into it, or of the newest run.

    Raises:
        CommandError: There is no such run, the message lists those there are; or it cannot be read.
    """
    if named is None:
        return _newest(roots.runs)
    try:
        return _named(named, roots)
    except OSError as error:
        raise CommandError(f"cannot read {shown(Path(named))}: {error.strerror}") from error


def _named(named: str, roots: Roots) -> Path:
    if EXPERIMENT.fullmatch(named) and (roots.runs / named).is_dir():
        return roots.runs / named
    path = Path(named)
    inside = next((folder for folder in (path, *path.absolute().parents) if is_run(folder)), None)
    if inside is not None and os.path.lexists(path):
        return inside
    if path.is_dir():
        raise CommandError(f"{shown(path)} is no run directory: it has none of {', '.join(RUN_FILES[:3])}")
    names = [folder.name for folder in _runs(roots.runs)]
    there = f"; there are: {', '.join(names)}" if names else ", nor any other"
    missing = (
        f"experiment {named!r}" if EXPERIMENT.fullmatch(named) else f"{shown(path)}, nor an experiment of that name"
    )
    raise CommandError(f"there is no {missing} in {shown(roots.runs)}{there}")


def is_run(folder: Path) -> bool:
    """Whether a directory is a run's."""
    return folder.is_dir() and any(os.path.lexists(folder / name) for name in RUN_FILES)


def last_change(folder: Path) -> float:
    """Return when a run last wrote a line, or when its directory changed if it has none. Unix seconds."""
    for path in (folder / METRICS, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _newest(root: Path) -> Path:
    runs = _runs(root)
    if not runs:
        raise CommandError(f"there is no run in {shown(root)}: name one, by its directory if it lies elsewhere")
    return max(runs, key=last_change)


def _runs(root: Path) -> list[Path]:
    try:
        return sorted(folder for folder in root.iterdir() if is_run(folder))
    except OSError:
        return []


@dataclass
class FollowedDirectory:
    """A run directory that stays the same one, wherever it is moved.

    It is held open for reading, which disturbs no one: so a move is told from a removal, and the way to it is known.
    """

    path: Path
    is_removed: bool = False
    moved_from: Path | None = None
    _opened: int | None = field(default=None, repr=False)

    def look(self) -> bool:
        """Find the directory again. Return whether it is another one than before, as after `rm -r` and a new run."""
        if self._opened is None:
            self._opened = _open(self.path)
            return False
        if _is_same(self._opened, self.path):
            return False
        moved_to = _place_of(self._opened)
        if moved_to is not None:
            self.moved_from, self.path = self.moved_from or self.path, moved_to
            return False
        replacement = _open(self.path)
        self.is_removed = replacement is None
        if replacement is None:
            return False
        os.close(self._opened)
        self._opened, self.moved_from = replacement, None
        return True


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


def _is_same(opened: int, path: Path) -> bool:
    """Whether the path leads to the opened directory. A file system that fails for a moment tells nothing."""
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _place_of(opened: int) -> Path | None:
    """Return where an opened directory is now, where the system tells; none if it was removed."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            place = Path(folder, str(opened)).readlink()
            return place if _is_same(opened, place) else None
    return None
