"""Tells the ranks why one of them has ended: through torchrun's store, which outlives it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.command_error import ExitCode
from orchestrator.distributed.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 2.0
"""Seconds in which a rank that has ended must have said why, or its process must be seen to be gone."""
POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class Failure:
    """Why a rank has ended."""

    rank: int
    host: str
    message: str
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


class FailureBoard:
    """What the ranks of one attempt know of one another."""

    def __init__(self, store: Store, place: Place) -> None:
        self._store = store
        self._place = place
        store.set(f"rank/{place.rank}", json.dumps([place.host, os.getpid()]))

    def own(self, message: str, code: int) -> Failure:
        """Return a failure of this rank."""
        return Failure(self._place.rank, self._place.host, message, code)

    def post(self, failure: Failure) -> bool:
        """Tell the other ranks of a failure. Return whether it is the first: then this rank tells the user as well."""
        try:
            is_first = bool(self._store.add("failures", 1) == 1)
            if is_first:
                self._store.set("failure", json.dumps(asdict(failure)))
        except RuntimeError:  # the store was served by a rank that is gone
            return True
        return is_first

    def who_ended(self, cause: str) -> Failure:
        """Return the failure that took a rank away from an exchange.

        Args:
            cause: What the exchange says, for a rank that ended without a word.
        """
        try:
            give_up = time.monotonic() + PATIENCE
            while time.monotonic() < give_up:
                if self._store.check(["failure"]):
                    return Failure(**json.loads(self._store.get("failure")))
                gone = self._gone()
                if gone is not None:
                    return gone
                time.sleep(POLL_INTERVAL)
        except RuntimeError:
            cause = f"{cause}; torchrun's store cannot be reached either"
        reason = f"another rank cannot be reached any more ({cause})"
        return self.own(reason, ExitCode.UNEXPECTED)

    def _gone(self) -> Failure | None:
        """Return the rank on this machine whose process has ended without a word."""
        for rank in range(self._place.world_size):
            host, process = json.loads(self._store.get(f"rank/{rank}"))
            if host == self._place.host and not _is_running(process):
                message = f"process {process} has ended without a word: it was killed, or the machine ran out of memory"
                return Failure(rank, host, message, ExitCode.UNEXPECTED)
        return None


def _is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return not Path("/proc/self").exists()
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
