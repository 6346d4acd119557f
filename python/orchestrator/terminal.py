"""Output to terminals, pipes and files: it never ends a run, and what it shows cannot control the terminal."""

from __future__ import annotations

import io
import os
import re
import select
import sys
from typing import TYPE_CHECKING, TextIO

from orchestrator.command_error import CommandError, ExitCode

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDIN, STDOUT, STDERR = 0, 1, 2
# Control characters other than newline and tab, line and paragraph separators, what reverses the direction of text,
# and halves of surrogate pairs. `training/src/terminal.rs` has the same list.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""Return text with the characters that control a terminal written out, an escape character as `\u{1b}`."""
    return _CONTROLS.sub(lambda match: f"\\u{{{ord(match[0]):x}}}", text)


class _Unfailing(io.FileIO):
    """A file whose writes never fail; it remembers the first error."""

    failure: OSError | None = None

    def write(self, content: ReadableBuffer) -> int:
        try:
            # Another process with the same pipe may have made it non-blocking.
            while (count := super().write(content)) is None:
                select.select([], [self], [])
            return count
        except OSError as error:
            self.failure = self.failure or error
            return memoryview(content).nbytes


def take_over() -> None:
    """Replace stdout and stderr of this process by streams whose writes never fail.

    A reader that went away, a full disk and characters that the encoding lacks do not stop what the program does.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        _open_if_closed(descriptor)
    sys.stdout = _writer(STDOUT, sys.stdout)
    sys.stderr = _writer(STDERR, sys.stderr)


def write(text: str) -> None:
    """Write to stdout at once, as it is.

    Raises:
        OSError: Stdout cannot take it, or nobody reads it any more.
    """
    print(text, end="", flush=True)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Unfailing) and raw.failure is not None:
        raise raw.failure


def result(text: str) -> None:
    """Print what a command was asked for. Nobody reading it any more is no error; that it cannot be written is one.

    Raises:
        CommandError: stdout cannot take it.
    """
    try:
        write(f"{text}\n")
    except BrokenPipeError:
        pass
    except OSError as failure:
        raise CommandError(f"cannot write to stdout: {failure.strerror}", ExitCode.UNEXPECTED) from failure


def complain(text: str) -> None:
    """Print a sentence on stderr."""
    print(escaped(text), file=sys.stderr, flush=True)


def _open_if_closed(descriptor: int) -> None:
    """Open /dev/null on a closed descriptor, which the next file that is opened would otherwise take."""
    try:
        os.fstat(descriptor)
    except OSError:
        null_device = os.open(os.devnull, os.O_RDWR)
        if null_device != descriptor:
            os.dup2(null_device, descriptor)
            os.close(null_device)
        os.set_inheritable(descriptor, True)


def _writer(descriptor: int, former: TextIO | None) -> io.TextIOWrapper:
    encoding = getattr(former, "encoding", None) or "utf-8"
    buffer = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=True)
