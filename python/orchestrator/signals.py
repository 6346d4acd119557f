"""What stops a program ends a command with one sentence, whatever it is doing; SIGUSR1 and SIGUSR2 do not."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from orchestrator.command_error import ExitCode

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
SAVE_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to save and continue. Where nothing trains, there is nothing to save."""
HANDLER_TIMEOUT = 0.5
"""Seconds the interpreter has to run a signal handler before the process exits; compiled code may delay it forever."""


_exit_callbacks: list[Callable[[], None]] = []


class Stopped(BaseException):
    """A signal asked the command to end. Not an `Exception`, so that no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}")
        # A closed terminal and spent CPU time count as SIGTERM.
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


class Terminated(SystemExit):
    """A signal other than Ctrl-C asks the trainer in this process to save and end."""

    def __init__(self, number: int) -> None:
        super().__init__(ExitCode.TERMINATED)
        self.signal = signal.Signals(number).name
        """The system's name of the signal, such as `SIGTERM`, which the trainer prints."""


def respected(numbers: tuple[signal.Signals, ...]) -> list[signal.Signals]:
    """Return these signals without a SIGHUP that the parent process ignores (`nohup`), which stays ignored."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` in the block when a signal arrives; exit if the handler cannot run. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    finished = threading.Event()
    threading.Thread(target=_exit_on_timeout, args=(receiver, finished), daemon=True).start()
    handlers = {number: signal.signal(number, _stop) for number in respected(STOPPING)}
    handlers |= {number: signal.signal(number, signal.SIG_IGN) for number in SAVE_REQUESTS}
    former = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        finished.set()
        signal.set_wakeup_fd(former)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wakeup.close()


@contextmanager
def without_timeout() -> Iterator[None]:
    """Disable the timeout of `stoppable` in the block, which may take long to end, as saving does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


@contextmanager
def on_forced_exit(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` if the timeout of `stoppable` exits the process within the block."""
    _exit_callbacks.append(call)
    try:
        yield
    finally:
        _exit_callbacks.remove(call)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def _exit_on_timeout(receiver: socket.socket, finished: threading.Event) -> None:
    """Exit if the block does not end in time after a signal, whose number C code writes to the socket."""
    with receiver:
        while number := receiver.recv(1):
            if number[0] in STOPPING and not finished.wait(HANDLER_TIMEOUT):
                _exit(Stopped(number[0]))


def _exit(stop: Stopped) -> None:
    """Exit without unwinding, after flushing the output and showing the cursor, which a progress bar hides."""
    print("\x1b[?25h" if sys.stdout.isatty() else "", end="", flush=True)
    print(f"orchestrate: {stop}", file=sys.stderr, flush=True)
    for call in _exit_callbacks:
        call()
    os._exit(stop.code)
