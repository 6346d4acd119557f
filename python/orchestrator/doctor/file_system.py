"""A folder's file system: its kind, and whether replacing and syncing files do what runs rely on."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import shown
from orchestrator.screen import counted
from orchestrator.written_files import replace, sync

REPLACEMENTS = 200
SIZE = 64 << 10
LOST_WITH = {"tmpfs": "the machine stops", "ramfs": "the machine stops", "overlay": "the container is removed"}
"""File systems that keep their files for a time only."""


def kind(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the kind of file system that a folder is on, such as `ext4`; None where the system does not tell.

    A line is `36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw`; the last mount of a device counts.
    """
    status = folder.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    with suppress(OSError):
        for line in reversed(mounts.read_text(encoding="utf-8", errors="replace").splitlines()):
            mount, _, source = line.partition(" - ")
            if mount.split()[2:3] == [device] and source:
                return source.split()[0]
    return None


def describe(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Finding:
    """Name the file system, and say if it forgets."""
    name = kind(folder, mounts)
    facts = {"folder": shown(folder), "file_system": name}
    if name in LOST_WITH:
        way_out = "name a folder on a disk in ORCHESTRATE_RUNS_ROOT or --run-dir"
        text = f"{shown(folder)} is {name}, whose files are lost when {LOST_WITH[name]}: {way_out}"
        return Finding("folder", Verdict.REMARK, text, facts)
    return Finding("folder", Verdict.GOOD, f"{shown(folder)} is {name or 'of a kind that is not told'}", facts)


def replacing(folder: Path) -> Finding:
    """Check that a file is read whole while it is replaced, and that files and folders can be synced."""
    path = folder / "replaced"
    contents = [bytes([65 + number]) * SIZE for number in range(2)]
    try:
        replace(path, contents[0])
        with _Reader(path, contents) as reader:
            for number in range(REPLACEMENTS):
                replace(path, contents[number % 2])
        sync(path)
        sync(folder)
    except OSError as error:
        text = f"{error.strerror} ({shown(folder)}): runs cannot be saved there; name another folder"
        return Finding("replacing", Verdict.BAD, text)
    facts = {"replacements": REPLACEMENTS, "reads": reader.reads}
    if reader.torn:
        text = f"a reader saw a file that was being replaced {reader.torn}: checkpoints there cannot be trusted"
        return Finding("replacing", Verdict.BAD, text, facts)
    text = f"{REPLACEMENTS} replacements, each seen whole by {counted(reader.reads, 'read')}; files and folders sync"
    return Finding("replacing", Verdict.GOOD, text, facts)


class _Reader:
    """A thread that reads a file again and again while the block lasts."""

    def __init__(self, path: Path, contents: list[bytes]) -> None:
        self.path, self.contents = path, contents
        self.reads = 0
        self.torn = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                if self.path.read_bytes() not in self.contents:
                    self.torn = "half written"
            except FileNotFoundError:
                self.torn = "missing"
            except OSError as error:
                self.torn = f"not at all ({error.strerror})"
            self.reads += 1
