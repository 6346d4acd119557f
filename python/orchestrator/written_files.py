"""Writes files whole or not at all, and says which disk or folder did not take them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator import _native
from orchestrator.paths import Roots, shown
from orchestrator.temporary_folder import staging_of

REFUSALS = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EDQUOT: "the quota of disk space is used up: free space",
    errno.EFBIG: "the limit on the size of a file (`ulimit -f`) is reached: raise it",
    errno.EROFS: "the file system is read-only: write elsewhere",
    errno.EACCES: "permission denied: give yourself permission to write there",
    errno.EPERM: "operation not permitted: give yourself permission to write there",
}
"""What a disk or folder refuses a write with, and the first way out."""


def replace(path: Path, content: str | bytes) -> None:
    """Write a file atomically and durably, through a temporary file beside it.

    Raises:
        OSError: It cannot be written; its `filename` is the path.
    """
    with naming(path):
        staging = staging_of(path)
        try:
            with staging.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the disk within the block name this path: writing raises errors that name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def explain(error: OSError) -> str:
    """Return a sentence about an error: what cannot be written, why, and the way out."""
    reason = REFUSALS.get(error.errno or 0)
    if reason is None or not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename)
    return f"cannot write {shown(path)}: {reason}{_elsewhere(path)}"


def _elsewhere(path: Path) -> str:
    """Name the variable that moves the folder that a path is in."""
    roots = Roots.from_environment()
    movable = {
        "ORCHESTRATE_CACHE_ROOT": _native.cache_root(),
        "ORCHESTRATE_RUNS_ROOT": roots.runs,
        "ORCHESTRATE_TOKENIZER_ROOT": roots.tokenizers,
    }
    for variable, root in movable.items():
        # What cannot be made may be a folder above the root.
        if path.absolute().is_relative_to(root.absolute()) or root.absolute().is_relative_to(path.absolute()):
            return f", or name a folder on another disk with {variable}"
    return ""
