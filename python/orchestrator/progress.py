"""The progress of a tokenizer's training: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from orchestrator.screen import LABEL_WIDTH, amount, duration, note

SECONDS_PER_LINE = 20


class Reading(Protocol):
    """Receives the progress of reading the text that a tokenizer is trained on."""

    def advance(self, share: float, documents: int, size: int) -> None:
        """Show the documents and bytes read so far; `share` is the fraction of a limit that they reach.

        The text may end long before the limit: how much there is, nobody knows before it is read.
        """

    def note(self, text: str) -> None:
        """Show a remark on the reading, such as what it waits for."""

    def end(self) -> None:
        """Show that reading has ended and that merging pairs of tokens follows."""


@contextmanager
def reading() -> Iterator[Reading]:
    """Show the progress of reading, and that training follows, while the block runs."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        lines = _Lines()
        try:
            yield lines
        finally:
            lines.stop()
        return
    # Without a total a bar moves and promises nothing: neither the text's end nor that of merging is known before.
    columns = (TextColumn(" " * LABEL_WIDTH + "{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, progress.add_task("reading", total=None))


@dataclass
class _Lines:
    """Progress as plain lines, one for each tenth of the limit."""

    tenths: int = 0
    finished: threading.Event = field(default_factory=threading.Event)
    merging: threading.Thread | None = None

    def advance(self, share: float, documents: int, size: int) -> None:
        if share * 10 >= self.tenths + 1:
            self.tenths = int(share * 10)
            note(_described(documents, size))

    def note(self, text: str) -> None:
        note(text)

    def end(self) -> None:
        note("all read; merging pairs of tokens ...")
        self.merging = threading.Thread(target=self._tell_of_merging, daemon=True)
        self.merging.start()

    def _tell_of_merging(self) -> None:
        """Say now and then that pairs are still merged: the library does not tell how far it is."""
        begin = time.monotonic()
        while not self.finished.wait(SECONDS_PER_LINE):
            note(f"merging pairs of tokens for {duration(time.monotonic() - begin)} ...")

    def stop(self) -> None:
        """Say no more, once the tokenizer is made."""
        self.finished.set()
        if self.merging is not None:
            self.merging.join()


@dataclass(frozen=True)
class _Bar:
    progress: Progress
    task: TaskID

    def advance(self, share: float, documents: int, size: int) -> None:
        self.progress.update(self.task, description=_described(documents, size))

    def note(self, text: str) -> None:
        self.progress.console.print(Text(" " * LABEL_WIDTH + text, style="dim"), soft_wrap=True)

    def end(self) -> None:
        self.progress.update(self.task, description="merging pairs of tokens")


def _described(documents: int, size: int) -> str:
    return f"read {documents:,} documents, {amount(size)}"
