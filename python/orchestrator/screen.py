"""Output for people: one line per step on stdout, in colour on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from orchestrator import _native
from orchestrator.terminal import complain, escaped

LABEL_WIDTH = 11


def step(label: str, text: str) -> None:
    """Print one step of the pipeline."""
    _print((f"{label:<{LABEL_WIDTH}}", "bold cyan"), (text, ""))


def note(text: str) -> None:
    """Print a remark under the step it belongs to."""
    _print((" " * LABEL_WIDTH + text, "dim"))


def finding(topic: str, text: str, verdict: str) -> None:
    """Print a finding of the doctor: good, a remark, or bad."""
    mark, style = {"good": ("ok", "bold green"), "remark": ("note", "bold yellow"), "bad": ("BAD", "bold red")}[verdict]
    _print((f"{mark:<5}", style), (f"{topic:<{LABEL_WIDTH}}", "bold cyan"), (text, ""))


def heading(text: str) -> None:
    """Print the line above a part of the last screen."""
    _print((f"\n{text}", "bold"))


def plain(text: str) -> None:
    """Print text as it is, indented."""
    for line in text.split("\n"):
        _print((f"  {line}", ""))


def warn(text: str) -> None:
    """Print a warning on stderr."""
    complain(f"warning: {text}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines in which the cells of a column have the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(map(escaped, lines))


def amount(size: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def counted(number: int | str, unit: str) -> str:
    """Return a number of things: `1 seed`, `3 seeds`, `2,000 steps`."""
    text = str(number)
    text = f"{int(text):,}" if text.isdecimal() else text
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


def loss_text(loss: float, digits: int = 4) -> str:
    """Return a loss with this many digits after the point; one that no model has, shortly."""
    return f"{loss:.{digits}f}" if abs(loss) < 1e6 else f"{loss:.2e}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units, as the trainer's progress has it: `15 d 7 h`, `3 min 20 s`, `8 s`."""
    return _native.duration(seconds)


def _print(*parts: tuple[str, str]) -> None:
    """Print pieces of text, each in its style."""
    text = Text.assemble(*((escaped(piece), style) for piece, style in parts))
    # soft_wrap: a path that is copied from the screen must not hold a line break.
    Console(file=sys.stdout, highlight=False).print(text, soft_wrap=True)
