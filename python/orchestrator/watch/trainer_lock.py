"""Asks whether a trainer holds a run's lock, without taking it: a lock taken for an instant would refuse a trainer."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.watch.run_directory import LOCK

MAX_LOCK_BYTES = 4096


class Held(enum.Enum):
    """Whether the lock is held."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """Only the machine that trains can tell."""


@dataclass(frozen=True)
class TrainerLock:
    """The lock's state, and the process that took it last, as its file names it."""

    held: Held
    pid: int | None = None
    host: str | None = None

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the process is, or was, one of this machine."""
        return self.host in (None, os.uname().nodename)


def ask(run: Path) -> TrainerLock:
    """Return the state of a run's lock, from the system's list of locks and from what the lock's file says."""
    path = run / LOCK
    owner = _owner(path)
    pid, host = owner.get("pid"), owner.get("host")
    pid = pid if isinstance(pid, int) and 0 < pid < 2**31 else None
    host = host if isinstance(host, str) else None
    try:
        status = path.stat()
    except FileNotFoundError:
        return TrainerLock(Held.UNKNOWN if (run / "metrics.jsonl").exists() else Held.NO)
    except OSError:
        return TrainerLock(Held.UNKNOWN)
    is_listed = _is_listed(status)
    if is_listed:
        return TrainerLock(Held.YES, pid, host)
    if host not in (None, os.uname().nodename):
        return TrainerLock(Held.UNKNOWN, pid, host)
    if pid is not None and _has_open(pid, status):
        # File systems such as btrfs list their locks under another device number.
        return TrainerLock(Held.YES, pid, host)
    return TrainerLock(Held.UNKNOWN if is_listed is None else Held.NO, pid, host)


def _owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            owner = json.loads(file.read(MAX_LOCK_BYTES))
        return owner if isinstance(owner, dict) else {}
    return {}


def _is_listed(status: os.stat_result) -> bool | None:
    """Whether Linux lists a lock of this file; none where the system has no list.

    A line is `1: FLOCK ADVISORY WRITE 4242 fe:00:10010834 0 EOF`; the device's numbers are hexadecimal.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    file_id = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(file_id in line.split() for line in lines if "->" not in line)


def _has_open(pid: int, status: os.stat_result) -> bool:
    """Whether a process of this machine has the file open, as far as this user may see."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), status):
                    return True
    return False
