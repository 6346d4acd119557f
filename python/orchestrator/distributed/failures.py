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
"""Seconds to wait until a rank that has ended reports why, or its process is seen to be gone."""


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
        """Return a failure of the rank that a process is."""
        return Failure(process.rank, process.host, message, code)

    @staticmethod
    def of_ended(process: Process) -> Failure:
        """Return the failure of a rank whose process is gone and has said nothing."""
        message = "has ended without a word: it was killed, or the machine ran out of memory"
        return Failure.of(process, f"process {process.number} {message}")


class FailureBoard:
    """Shares the failures of an attempt's ranks between them, through torchrun's store."""

    def __init__(self, store: Store, attempt: Attempt, ending: threading.Lock) -> None:
        """Create the board of an attempt.

        Args:
            store: A connection to torchrun's store.
            attempt: The ranks.
            ending: Acquired and never released by the thread that ends this process, so that only that one reports.
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
        """Return the failure that was reported, None if there is none; raise `RuntimeError` without the store."""
        return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None

    def who_ended(self, cause: str, silent: Callable[[], Process | None]) -> Failure:
        """Return why an exchange has failed: the failure of the rank that no longer takes part.

        Args:
            cause: The error of the exchange, reported if the rank has not said why it ended.
            silent: Returns a rank that has not answered for some seconds, None if all have.
        """
        give_up = time.monotonic() + PATIENCE
        has_store = True
        while time.monotonic() < give_up:
            try:
                failure = self.told() if has_store else None
            except RuntimeError:  # it was served by the rank that has ended
                has_store, failure = False, None
            if failure is not None:
                return failure
            ended_process = self.gone()
            if ended_process is not None:
                return Failure.of_ended(ended_process)
            time.sleep(POLL_INTERVAL)
        process = silent()
        if process is not None:
            return Failure.of(process, f"it cannot be reached any more ({cause}): it was killed, or lost its network")
        store = "" if has_store else "; torchrun's store cannot be reached either"
        return self.own(f"another rank cannot be reached any more ({cause}{store})", ExitCode.UNEXPECTED)

    def gone(self) -> Process | None:
        """Return a rank of this machine whose process has ended, None if all run."""
        return next((process for process in self._attempt.of_this_machine() if not process.is_running()), None)

    def _post(self, failure: Failure) -> bool:
        """Store a failure for the other ranks if it is the first. Return whether it is."""
        try:
            is_first = bool(self._store.add("failures", 1) == 1)
            if is_first:
                self._store.set("failure", json.dumps(asdict(failure)))
        except RuntimeError:  # the store was served by a rank that is gone
            return True
        return is_first
