"""The loop of `orchestrate watch`: look, show, wait for a key; it reads the run's files and writes nothing."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from orchestrator import _native, terminal
from orchestrator.command_error import CommandError, ExitCode, reason
from orchestrator.paths import shown
from orchestrator.signals import Stopped, on_forced_exit
from orchestrator.watch import trainer_lock, wording
from orchestrator.watch.metrics_file import MetricsFile
from orchestrator.watch.panel import Screen
from orchestrator.watch.run_directory import METRICS, FollowedDirectory
from orchestrator.watch.status import Status, as_json, assess

BUDGET = 16 << 20
"""Bytes of metrics read between two looks at the keyboard: a twentieth of a second's work."""
MAX_PLAIN_WIDTH = 120
POLL_SECONDS = 0.2
"""Seconds between two looks at the size of the terminal."""
QUIT_KEYS = b"qQ\x03\x04"
"""q, and Ctrl-C and Ctrl-D where the terminal hands them over as keys."""


@dataclass
class Watched:
    """A run's directory, and what has been read from it."""

    directory: FollowedDirectory
    file: MetricsFile = field(default_factory=MetricsFile)
    problem: str | None = None
    """Why the metrics cannot be read; None if they can."""
    last: Status | None = None
    """The last status from the run's files, which stays when they are removed."""

    def look(self, budget: int = BUDGET) -> Status:
        """Read what is new and return the run's status."""
        if self.directory.look():
            self.file, self.last = MetricsFile(), None
        path = self.directory.path
        self.problem = None
        if not self.directory.is_removed:
            try:
                self.file.read(path / METRICS, budget)
            except OSError as error:
                self.problem = reason(error)
        now = time.time()
        if self.directory.is_removed and self.last is not None:
            status = self.last.after_removal(now)
        else:
            status = assess(path, self.file.metrics, trainer_lock.ask(path), self.directory.is_removed, now)
            self.last = status
        if self.directory.moved_from is not None:
            status.warnings.insert(0, f"{shown(self.directory.moved_from)} is now {shown(path)}")
        if self.problem is not None:
            status.warnings.insert(0, f"cannot read {METRICS}: {self.problem}")
        return status


def run(name: str | None, once: bool, is_json: bool, interval: float) -> None:
    """Show a run until a key or its end; once if `once`.

    Raises:
        CommandError: There is no such run, or it cannot be read where it is shown once.
    """
    if is_json and not once:
        raise CommandError("--json prints one object: give --once with it")
    watched = Watched(FollowedDirectory(_native.run_directory(name)))
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    console = Console(file=sys.stdout, highlight=False)
    if once:
        _show_once(watched, is_json, unicode)
        return
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _show_live(watched, console, interval, unicode)
        else:
            _show_lines(watched, interval, unicode)
    except Stopped as stop:
        # Ctrl-C is a usual way to quit.
        if stop.code != ExitCode.INTERRUPTED:
            raise


def _show_once(watched: Watched, is_json: bool, unicode: bool) -> None:
    status = _caught_up(watched)
    if watched.problem is not None:
        raise CommandError(f"cannot read {shown(status.directory / METRICS)}: {watched.problem}")
    terminal.result(json.dumps(as_json(status)) if is_json else wording.plain(status, _plain_width(), unicode))


def _show_lines(watched: Watched, interval: float, unicode: bool) -> None:
    """Show the run as text, then a line whenever there is news, until it is over."""
    status = _caught_up(watched)
    terminal.result(wording.plain(status, _plain_width(), unicode))
    while not status.state.is_over:
        shown_before = status.state, status.metrics.lines
        time.sleep(interval)
        status = _caught_up(watched)
        if (status.state, status.metrics.lines) == shown_before:
            continue
        try:
            terminal.write(f"{wording.line(status)}\n")
        except BrokenPipeError:
            return


def _caught_up(watched: Watched) -> Status:
    status = watched.look()
    while watched.file.has_more and watched.problem is None:
        status = watched.look()
    return status


def _plain_width() -> int:
    return min(MAX_PLAIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)


def _show_live(watched: Watched, console: Console, interval: float, unicode: bool) -> None:
    """Fill the terminal with the run's status, again and again."""
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            # The size of the terminal itself: COLUMNS and LINES do not follow when it is resized.
            console.size = _size()
            status = watched.look()
            live.update(Screen(status, _note(watched, status, keyboard is not None), unicode), refresh=True)
            if _quits(keyboard, 0.0 if watched.file.has_more else interval):
                return


def _note(watched: Watched, status: Status, has_keys: bool) -> str:
    """Return the last line of the screen."""
    leave = "q or Ctrl-C leaves" if has_keys else "Ctrl-C leaves"
    if watched.file.has_more:
        part = watched.file.position / max(1, watched.file.size)
        return f"reading {METRICS}: {100 * part:.0f} %; {leave}"
    run = "" if status.state.is_over else ", the run goes on"
    return f"{leave}{run}; {time.strftime('%H:%M:%S')}"


@contextmanager
def _keys() -> Iterator[int | None]:
    """Yield the descriptor that pressed keys are read from, None if stdin is no terminal; restore its modes."""
    if not sys.stdin or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def restore() -> None:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(keyboard, termios.TCSANOW, before)

    def leave_screen() -> None:
        os.write(terminal.STDOUT, b"\x1b[?1049l\x1b[?25h")
        restore()

    with on_forced_exit(leave_screen):
        tty.setcbreak(keyboard)
        _ignore_suspension(keyboard)
        try:
            yield keyboard
        finally:
            restore()


def _ignore_suspension(keyboard: int) -> None:
    """Turn off Ctrl-Z, which would leave the shell on this screen."""
    settings = termios.tcgetattr(keyboard)
    settings[6][termios.VSUSP] = b"\x00"
    termios.tcsetattr(keyboard, termios.TCSANOW, settings)


def _size() -> ConsoleDimensions:
    """Return the columns and lines of the terminal; 80 and 24 if it does not tell."""
    with suppress(OSError):
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        if columns > 0 and lines > 0:
            return ConsoleDimensions(columns, lines)
    return ConsoleDimensions(80, 24)


def _quits(keyboard: int | None, seconds: float) -> bool:
    """Wait until it is time to look again, or the terminal's size has changed. Return whether to leave."""
    size, deadline = _size(), time.monotonic() + seconds
    while True:
        remaining = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([] if keyboard is None else [keyboard], [], [], min(remaining, POLL_SECONDS))
        if ready and keyboard is not None:
            keys = _pressed(keyboard)
            if not keys or any(key in QUIT_KEYS for key in keys):
                return True
        if remaining <= 0 or _size() != size:
            return False


def _pressed(keyboard: int) -> bytes:
    """Return the keys that wait to be read; none if the terminal was closed."""
    with suppress(OSError):
        return os.read(keyboard, 1024)
    return b""
