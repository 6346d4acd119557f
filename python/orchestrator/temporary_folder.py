"""Temporary files and folders, which are removed when they have served, also when a signal ends the process."""

from __future__ import annotations

import atexit
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orchestrator import signals


def staging_of(target: Path) -> Path:
    """Return the path at which this process writes what becomes `target`; removes what killed processes left there."""
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
        owner = leftover.name.removeprefix(prefix)
        if owner.isdecimal() and not _is_running(int(owner)):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    return target.with_name(f"{prefix}{os.getpid()}")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@contextmanager
def removed(folder: Path) -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block, also when a signal ends the process there."""

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    remove()
    with signals.on_forced_exit(remove):
        try:
            folder.mkdir()
            yield folder
        finally:
            remove()


def until_exit(name: str) -> Path:
    """Make a folder in the system's place for temporary files that is removed when the program ends."""
    folder = Path(tempfile.gettempdir(), f"orchestrate-{name}-{os.getpid()}")
    stack = ExitStack()
    stack.enter_context(removed(folder))
    atexit.register(stack.close)
    return folder
