"""Tells the ranks why one of them has ended: through torchrun's store, which outlives it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from orchestrator import terminal
from orchestrator.command_error import ExitCode
from orchestrator.distributed.attempt import POLL_INTERVAL, Attempt, Process

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 4.0
"""Seconds in which a rank that has ended must have said why, or its process must be seen to be gone."""


@dataclass(frozen=True)
class Failure:
    """Why a rank has ended."""

    rank: int
    host: str
    message: str
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"

    @staticmethod
    def of(process: Process, message: str, code: int = ExitCode.UNEXPECTED) -> Failure:
        """Return a failure of another rank."""
        return Failure(process.rank, process.host, message, code)

    @staticmethod
    def of_ended(process: Process) -> Failure:
        """Return the failure of a rank whose process is gone and has said nothing."""
        message = "has ended without a word: it was killed, or the machine ran out of memory"
        return Failure.of(process, f"process {process.number} {message}")


class FailureBoard:
    """What the ranks of one attempt know of one another's failures."""

    def __init__(self, store: Store, attempt: Attempt, ending: threading.Lock) -> None:
        """Begin.

        Args:
            store: A connection to torchrun's store.
            attempt: The ranks.
            ending: Held by the thread that ends this process, for good: the others have nothing more to say.
        """
        self._store = attempt.keys_in(store)
        self._attempt = attempt
        self._ending = ending

    def own(self, message: str, code: int) -> Failure:
        """Return a failure of this rank."""
        return Failure.of(self._attempt.own, message, code)

    def tell(self, failure: Failure) -> None:
        """Tell the other ranks of a failure, and the user if it is the first: one rank says why a run ends.

        The caller ends this process.
        """
        self._ending.acquire()
        if self._post(failure):
            terminal.complain(f"orchestrate: {failure}")

    def told(self) -> Failure | None:
        """Return the failure that was told, if one was; raise `RuntimeError` if the store cannot be reached."""
        return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None

    def who_ended(self, cause: str, silent: Callable[[], Process | None]) -> Failure:
        """Return the failure that took a rank away from an exchange.

        Args:
            cause: What the exchange says, for a rank that ended without a word.
            silent: Returns a rank that has not answered for some seconds.
        """
        give_up = time.monotonic() + PATIENCE
        has_store = True
        while time.monotonic() < give_up:
            try:
                told = self.told() if has_store else None
            except RuntimeError:  # it was served by the rank that has ended
                has_store, told = False, None
            if told is not None:
                return told
            gone = self.gone()
            if gone is not None:
                return Failure.of_ended(gone)
            time.sleep(POLL_INTERVAL)
        process = silent()
        if process is not None:
            return Failure.of(process, f"it cannot be reached any more ({cause}): it was killed, or lost its network")
        store = "" if has_store else "; torchrun's store cannot be reached either"
        return self.own(f"another rank cannot be reached any more ({cause}{store})", ExitCode.UNEXPECTED)

    def gone(self) -> Process | None:
        """Return a rank of this machine whose process has ended."""
        return next((process for process in self._attempt.of_this_machine() if not process.is_running()), None)

    def _post(self, failure: Failure) -> bool:
        """Leave a failure for the other ranks. Return whether it is the first."""
        try:
            is_first = bool(self._store.add("failures", 1) == 1)
            if is_first:
                self._store.set("failure", json.dumps(asdict(failure)))
        except RuntimeError:  # the store was served by a rank that is gone
            return True
        return is_first
