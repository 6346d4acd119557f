"""A program on a terminal that an emulator draws, so that a test reads what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyte
from workspace import Workspace

TIMEOUT = 60


@dataclass
class EmulatedTerminal:
    """A running program, and the screen it draws on."""

    process: subprocess.Popen[bytes]
    descriptor: int
    screen: pyte.Screen
    stream: pyte.ByteStream
    written: bytes = b""
    modes: list[object] = field(default_factory=list)
    """The terminal's modes before the program started."""

    @property
    def text(self) -> str:
        """The screen as lines without trailing spaces."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, *words: str, without: str | None = None) -> str:
        """Draw what the program writes until the screen shows these words, and not those; return the screen."""
        deadline = time.monotonic() + TIMEOUT
        while not all(word in self.text for word in words) or (without is not None and without in self.text):
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"no {words} in {TIMEOUT} s on the screen:\n{self.text}"
            assert self.draw(remaining), f"the program ended without {words}:\n{self.text}"
        return self.text

    def draw(self, seconds: float) -> bool:
        """Draw what the program writes next; False if it has closed the terminal."""
        ready, _, _ = select.select([self.descriptor], [], [], seconds)
        if not ready:
            return True
        try:
            piece = os.read(self.descriptor, 65536)
        except OSError:  # Linux raises it once the program has closed the terminal
            return False
        self.written += piece
        self.stream.feed(piece)
        return bool(piece)

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self.descriptor, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        set_size(self.descriptor, columns, lines)
        self.screen.resize(lines, columns)
        self.screen.reset()

    def wait_for_end(self) -> int:
        """Draw until the program ends; return its exit code."""
        deadline = time.monotonic() + TIMEOUT
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
            self.draw(0.05)
        while select.select([self.descriptor], [], [], 0)[0] and self.draw(0):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Close the terminal, as a lost connection does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def modes_now(self) -> list[object]:
        """Return the terminal's modes."""
        return list(termios.tcgetattr(self.descriptor))


def set_size(descriptor: int, columns: int, lines: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def on_terminal(
    workspace: Workspace, *command: str | Path, columns: int = 100, lines: int = 34, **environment: str
) -> Iterator[EmulatedTerminal]:
    """Run a program with a terminal of its own as stdin, stdout and stderr; it is killed at the end."""
    ours, theirs = pty.openpty()
    set_size(ours, columns, lines)
    modes = list(termios.tcgetattr(theirs))
    process = subprocess.Popen(
        [str(word) for word in command], cwd=workspace.root, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**workspace.environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), start_new_session=True,
    )  # fmt: skip
    screen = pyte.Screen(columns, lines)
    terminal = EmulatedTerminal(process, ours, screen, pyte.ByteStream(screen), modes=modes)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait(timeout=TIMEOUT)
        os.close(theirs)
        terminal.close()
