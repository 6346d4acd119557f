"""Folders that are removed when they have served, also when a signal ends the process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orchestrator import signals


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it at the end of the block, also when a signal ends the process there."""

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    remove()
    with signals.on_forced_exit(remove):
        try:
            folder.mkdir()
            yield
        finally:
            remove()


def until_exit(name: str) -> Path:
    """Make a folder in the system's place for temporary files that is removed when the program ends."""
    folder = Path(tempfile.gettempdir(), f"orchestrate-{name}-{os.getpid()}")
    kept = ExitStack()
    kept.enter_context(removed(folder))
    atexit.register(kept.close)
    return folder
