"""The directory of a run: its files, and followed when it is moved, replaced or removed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

CONFIG = "training.yaml"
METRICS = "metrics.jsonl"
LOCK = ".trainer.lock"


def last_change(folder: Path) -> float:
    """Return when a run last wrote a line, or when its directory changed if it has none. Unix seconds."""
    for path in (folder / METRICS, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


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


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the path leads to the opened directory. A file system that fails for a moment tells nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _place_of(descriptor: int) -> Path | None:
    """Return where an opened directory is now, where the system tells; none if it was removed."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            place = Path(folder, str(descriptor)).readlink()
            return place if _is_same(descriptor, place) else None
    return None
