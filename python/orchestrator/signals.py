"""Ctrl-C and SIGTERM: they end the command with a sentence, whatever it is doing."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
GRACE = 0.5
"""Seconds that the interpreter has to answer; compiled code may keep it from seeing a signal."""


_at_end: list[Callable[[], None]] = []


class Stopped(BaseException):
    """A signal asked the command to end. No `Exception`, so that nobody takes it for a failure of their own."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {NAMES[signal.Signals(number)]}")
        self.code = 128 + number


@contextmanager
def answered() -> Iterator[None]:
    """Raise `Stopped` where a signal finds the block; end the process where that is not heard. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    left = threading.Event()
    threading.Thread(target=_end_unless_left, args=(heard, left), daemon=True).start()
    handlers = {number: signal.signal(number, _stop) for number in NAMES}
    former = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(former)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wakeup.close()


@contextmanager
def unwatched() -> Iterator[None]:
    """Let the block take its time to answer signals, as one that saves does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


@contextmanager
def at_end(call: Callable[[], None]) -> Iterator[None]:
    """Call it where a signal ends the process within the block without unwinding it."""
    _at_end.append(call)
    try:
        yield
    finally:
        _at_end.remove(call)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def _end_unless_left(heard: socket.socket, left: threading.Event) -> None:
    """Wait for the numbers of signals, which arrive whatever the interpreter is doing."""
    with heard:
        while number := heard.recv(1):
            if number[0] in NAMES and not left.wait(GRACE):
                _end(Stopped(number[0]))


def _end(stopped: Stopped) -> None:
    """End the process as it is, with what was printed; a bar had hidden the cursor."""
    print("\x1b[?25h" if sys.stdout.isatty() else "", end="", flush=True)
    print(f"orchestrate: {stopped}", file=sys.stderr, flush=True)
    for call in _at_end:
        call()
    os._exit(stopped.code)
