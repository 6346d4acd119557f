"""Notices a rank that no longer runs: one that is stopped, whose machine hangs, or that the network has cut off.

A thread of every rank counts up a number in torchrun's store and reads the others'. It does so whatever the rank
computes, loads or saves, so a long evaluation is no silence; a stopped process counts no further.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from orchestrator import terminal
from orchestrator.command_error import ExitCode
from orchestrator.distributed.attempt import POLL_INTERVAL, Attempt, Process
from orchestrator.distributed.failures import PATIENCE, Failure, FailureBoard

if TYPE_CHECKING:
    from torch.distributed import Store

INTERVAL = 0.5
"""Seconds between two beats."""
DONE = -1
"""The beat of a rank that has trained to the end."""


class Heartbeat:
    """Shows the other ranks that this process runs, and ends it once one of them does not.

    It ends the process itself, for the trainer may be waiting in an exchange, or evaluating for an hour.
    """

    def __init__(self, store: Store, attempt: Attempt, ending: threading.Lock) -> None:
        """Start the threads.

        Args:
            store: A connection of its own: one that waits for an answer makes every other user wait.
            attempt: The ranks.
            ending: Held by the thread that ends this process.
        """
        self._store = attempt.keys_in(store)
        self._board = FailureBoard(store, attempt, ending)
        self._attempt = attempt
        self._ending = ending
        self._timeout = attempt.rank_info.timeout
        self._keys = [f"beat/{process.rank}" for process in attempt.processes]
        self._beats = [0] * len(self._keys)
        self._heard = [0.0] * len(self._keys)
        """The value of `_now` when each rank's beat last advanced."""
        self._now = 0.0
        self._rounds = 0
        self._told: tuple[float, Failure] | None = None
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._beat, self._watch_store)]
        for thread in self._threads:
            thread.start()

    def silent(self) -> Process | None:
        """Return the rank that has not answered for the longest time; None if that is under half of `PATIENCE`."""
        rank = min(self._others(), key=self._heard.__getitem__, default=None)
        if rank is None or self._now - self._heard[rank] < PATIENCE / 2:
            return None
        return self._attempt.processes[rank]

    def stop(self) -> None:
        """Tell the other ranks that this one is done. A rank that serves the store waits until all are."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(self._timeout)

    def _others(self) -> list[int]:
        own = self._attempt.rank_info.rank
        return [rank for rank, beat in enumerate(self._beats) if rank != own and beat != DONE]

    def _beat(self) -> None:
        try:
            clock = RunningClock()
            while not self._stopping.wait(INTERVAL):
                self._now = clock.seconds()
                process = self._board.gone()
                self._exchange(self._rounds + 1)
                self._judge(process)
            self._finish()
        except RuntimeError:  # the store is gone; a thread that waits for another rank may know why
            if not self._stopping.wait(2 * PATIENCE):
                self._end_without_store("is gone: its process has ended, or its machine has")
        except MemoryError:  # no memory for a sentence either
            os._exit(ExitCode.OUT_OF_MEMORY)

    def _exchange(self, beat: int) -> None:
        self._store.set(self._keys[self._attempt.rank_info.rank], str(beat))
        for rank, count in enumerate(map(int, self._store.multi_get(self._keys))):
            if count != self._beats[rank]:
                self._beats[rank], self._heard[rank] = count, self._now
        self._rounds += 1

    def _judge(self, process: Process | None) -> None:
        """End this process if another rank has failed, has ended or no longer answers.

        Args:
            process: A process that had ended before the beats were read, so that its beat is `DONE` if it was done.
        """
        failure = self._board.told()
        if failure is not None:  # the trainer ends when it next waits for the others, which may be late
            self._told = self._told or (self._now, failure)
            if self._now - self._told[0] >= self._timeout:
                self._end(failure)
        elif process is not None and self._beats[process.rank] != DONE:
            self._end(Failure.of_ended(process))
        else:
            silent = [rank for rank in self._others() if self._now - self._heard[rank] >= self._timeout]
            for rank in silent[:1]:
                self._end_with(self._attempt.processes[rank])

    def _end_with(self, silent: Process) -> None:
        """End this process, and a silent one of this machine: torchrun would wait for it."""
        message = f"process {silent.number} has not answered for {self._timeout:g} seconds"
        is_local = silent in self._attempt.of_this_machine()
        how = "and was killed: it was stopped" if is_local else "it is stopped, or its machine or network is down"
        self._board.tell(Failure.of(silent, f"{message}{' ' if is_local else ': '}{how}"))
        if is_local and silent.is_running():
            os.kill(silent.number, signal.SIGKILL)
        os._exit(ExitCode.UNEXPECTED)

    def _finish(self) -> None:
        beat = DONE
        self._exchange(beat)
        if self._attempt.rank_info.rank == 0 and not self._attempt.rank_info.store_is_served:
            give_up = time.monotonic() + self._timeout
            while self._others() and time.monotonic() < give_up:
                time.sleep(INTERVAL)
                self._exchange(beat)

    def _watch_store(self) -> None:
        """End this process if the store no longer answers, which blocks the thread that asks it."""
        clock, rounds, answered = RunningClock(), -1, 0.0
        while not self._stopping.wait(INTERVAL):
            seconds = clock.seconds()
            if rounds != self._rounds:
                rounds, answered = self._rounds, seconds
            elif seconds - answered >= self._timeout:
                self._end_without_store(f"has not answered for {self._timeout:g} seconds")

    def _end(self, failure: Failure) -> None:
        self._board.tell(failure)
        os._exit(failure.code)

    def _end_without_store(self, how: str) -> None:
        """End this process, and say why if it is the first rank of this machine: it cannot ask the others."""
        own, rank_info = self._attempt.own, self._attempt.rank_info
        self._ending.acquire(timeout=PATIENCE)  # its holder may be waiting for the store
        reporter = min([own, *self._attempt.of_this_machine()], key=lambda process: process.rank)
        if reporter == own:
            server = "torchrun" if rank_info.store_is_served else f"rank 0 on {self._attempt.processes[0].host}"
            reason = f"the store of {server} at {rank_info.address}:{rank_info.port} {how}"
            terminal.complain(f"orchestrate: {Failure.of(own, reason)}")
        else:  # if this process ended first, the trainer there would take it for the reason
            give_up = time.monotonic() + PATIENCE
            while reporter.is_running() and time.monotonic() < give_up:
                time.sleep(POLL_INTERVAL)
        os._exit(ExitCode.UNEXPECTED)


class RunningClock:
    """Counts the seconds in which this process has run; it is read about every `INTERVAL`.

    After a pause of this process or its machine the others' beats are old, which says nothing of the others.
    """

    def __init__(self) -> None:
        self._read = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._read, 2 * INTERVAL)
        self._read = now
        return self._seconds
