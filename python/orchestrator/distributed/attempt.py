"""Brings the ranks of one attempt together in torchrun's store, where earlier attempts have left their entries.

torchrun counts restarts per machine: after a failure the machines' counts differ, and one store serves all attempts. So
rank 0 names the attempt, the others register under that name, and each accepts only a list of processes it is in.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.distributed.rank_info import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

START_TIMEOUT = 1800.0
"""Seconds in which all ranks must have started."""
POLL_INTERVAL = 0.02
_FOLDER = "orchestrator"
_TRAINING = f"{_FOLDER}/training"


@dataclass(frozen=True)
class Process:
    """One rank's process."""

    rank: int
    host: str
    machine: str
    """Boot id and PID namespace, or the host name without /proc: processes with equal ones see each other's PIDs."""
    number: int
    started: str
    """Start time in ticks since boot, which tells the process from a later one with the same PID; "" without /proc."""
    restarts: int
    token: str
    """A random id that no process of an earlier attempt has."""

    @staticmethod
    def this(rank_info: RankInfo) -> Process:
        """Describe this process."""
        number = os.getpid()
        return Process(
            rank_info.rank, rank_info.host, _machine(rank_info.host), number, _started(number) or "",
            rank_info.restarts, uuid.uuid4().hex,
        )  # fmt: skip

    def is_running(self) -> bool:
        """Whether a process of this machine still runs."""
        return not Path("/proc/self").exists() or _started(self.number) == self.started


@dataclass(frozen=True)
class Attempt:
    """The processes that train together until one of them ends."""

    name: str
    rank_info: RankInfo
    processes: list[Process]
    """The processes of all ranks, by rank."""
    resumes: bool
    """Whether an earlier attempt has trained already."""

    @property
    def own(self) -> Process:
        """This rank's process."""
        return self.processes[self.rank_info.rank]

    def of_this_machine(self) -> list[Process]:
        """Return the processes of the other ranks on this machine, whose PIDs this process can see."""
        return [other for other in self.processes if other.machine == self.own.machine and other != self.own]

    def keys_in(self, store: Store) -> Store:
        """Return a view of a store with the keys of this attempt only."""
        return _prefixed(store, self.name)


def join(store: Store, rank_info: RankInfo) -> Attempt:
    """Register this rank and wait until all ranks have. Signals end the wait.

    Raises:
        CommandError: A rank has not registered within `START_TIMEOUT`.
    """
    own = Process.this(rank_info)
    name = uuid.uuid4().hex if rank_info.rank == 0 else ""
    if rank_info.rank == 0:
        _register(store, name, own)
        store.set(f"{_FOLDER}/attempt", name)
    # If a rank is missing, rank 0 says so; the others wait a little longer for it.
    give_up = time.monotonic() + START_TIMEOUT + (60 if rank_info.rank else 0)
    while time.monotonic() < give_up:
        if rank_info.rank == 0:
            _list_processes(store, name, rank_info.world_size)
        elif store.check([f"{_FOLDER}/attempt"]):
            current = store.get(f"{_FOLDER}/attempt").decode()
            if current != name:
                name = current
                _register(store, name, own)
        processes = _listed(store, name)
        if own in processes:
            # A store that rank 0 serves is empty at the start of every attempt: only the count of restarts is known.
            was_restarted = not rank_info.store_is_served and any(process.restarts for process in processes)
            return Attempt(name, rank_info, processes, was_restarted or store.check([_TRAINING]))
        time.sleep(POLL_INTERVAL)
    missing_ranks = (
        [0]
        if rank_info.rank
        else [r for r in range(rank_info.world_size) if not _prefixed(store, name).check([_key(r)])]
    )
    raise CommandError(
        f"ranks {', '.join(map(str, missing_ranks))} of {rank_info.world_size} have not started within "
        f"{START_TIMEOUT / 60:.0f} minutes",
        ExitCode.UNEXPECTED,
    )


def remember_training(store: Store) -> None:
    """Record in the store that training has begun, so that later attempts resume."""
    store.set(_TRAINING, "")


def _prefixed(store: Store, name: str) -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(f"{_FOLDER}/{name}", store)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _register(store: Store, name: str, own: Process) -> None:
    entries = _prefixed(store, name)
    entries.set(f"beat/{own.rank}", "0")
    entries.set(_key(own.rank), json.dumps(asdict(own)))


def _list_processes(store: Store, name: str, world_size: int) -> None:
    entries = _prefixed(store, name)
    keys = [_key(rank) for rank in range(world_size)]
    if entries.check(keys):
        entries.set("processes", json.dumps([json.loads(entries.get(key)) for key in keys]))


def _listed(store: Store, name: str) -> list[Process]:
    entries = _prefixed(store, name)
    if not name or not entries.check(["processes"]):
        return []
    return [Process(**process) for process in json.loads(entries.get("processes"))]


def _machine(host: str) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return host


def _started(process: int) -> str | None:
    """Return when a process was started, in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
