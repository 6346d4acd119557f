"""Reads metrics.jsonl as a run appends to it: each byte once, in bounded memory, whatever it holds."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.input_files import check_regular

Row = dict[str, Any]

WINDOW = 100
"""The newest rows of a kind that are kept whole, for means and medians."""
MAX_POINTS = 4096
"""Points that a curve keeps: four times the dots across the widest terminals."""
MAX_TEXTS = 8
"""Pieces of advice, and samples, that are kept at most."""
MAX_CHARACTERS = 4000
"""Characters that are kept of a sample's text."""
PIECE = 4 << 20
"""Bytes parsed at a time."""
MAX_LINE = 16 << 20
"""Bytes of a line at most; no line that a trainer writes is longer."""
OVERLAP = 256
"""Bytes before the position that are compared to tell whether the file is still the same."""
FREQUENT = (b'{"kind":"train"', b'{"kind":"utilization"')
"""The beginnings of the lines that are too frequent in a long file to parse every one."""
KIND = slice(9, 14)
"""The bytes of such a line that tell its kind."""


class TrainPoint(NamedTuple):
    """The values of a step that curves show; None where the line has no finite number."""

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None


@dataclass
class Curve:
    """Points of a run from its first step to its last. When they get too many, every second one is dropped."""

    points: list[Any] = field(default_factory=list)
    stride: int = 1
    offered: int = 0

    def offer(self, point: object) -> None:
        """Add the next point, if it is one of those that are kept."""
        if self.offered % self.stride == 0:
            self.points.append(point)
        self.offered += 1
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.stride *= 2

    def skip(self) -> bool:
        """Pass over the next point if it would be dropped; return whether it was."""
        is_dropped = self.offered % self.stride != 0
        self.offered += is_dropped
        return is_dropped


@dataclass
class Metrics:
    """The content of the lines read so far."""

    train: Curve = field(default_factory=Curve)
    evaluations: Curve = field(default_factory=Curve)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The newest train rows."""
    utilization: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evaluation: Row | None = None
    best: Row | None = None
    """The evaluation with the lowest loss, of the current stage."""
    samples: dict[str, Row] = field(default_factory=dict)
    """The newest sample of each prompt, the newest last."""
    advice: dict[str, Row] = field(default_factory=dict)
    """The newest line of each piece of advice by its text, the newest last."""
    data: Row | None = None
    """The newest row of skipped rows and files; None if nothing was skipped."""
    stage: Row | None = None
    """The row of the start of the current stage."""
    end: Row | None = None
    """The row that says why training ended; None if a later line follows."""
    step: int = 0
    """The step of the last line."""
    lines: int = 0
    damaged: int = 0
    """Lines that are not a row of metrics."""

    def add(self, row: Row) -> None:
        """Take in a row. Kinds that are not known are passed over."""
        self.lines += 1
        self.step = row["step"]
        kind = row["kind"]
        self.end = row if kind == "end" else None
        if kind == "train":
            self.recent.append(row)
            self.train.offer(_point(row))
        elif kind == "evaluation":
            self._add_evaluation(row)
        elif kind == "utilization":
            self.utilization.append(row)
        elif kind == "data":
            self.data = row
        elif kind == "stage":
            self.stage = row
            # Held-out losses of stages with other sequences or data are not comparable.
            self.best = None
        elif kind == "sample":
            shortened = {name: value[:MAX_CHARACTERS] for name, value in row.items() if isinstance(value, str)}
            _keep(self.samples, str(row.get("prompt", "")), row | shortened)
        elif kind == "advice":
            _keep(self.advice, str(row.get("text", "")), row)

    def train_points(self) -> list[TrainPoint]:
        """Return the points of the curves, the newest step among them."""
        points: list[TrainPoint] = self.train.points
        if self.recent and self.recent[-1]["step"] > points[-1].step:
            return [*points, _point(self.recent[-1])]
        return points

    def _add_evaluation(self, row: Row) -> None:
        self.evaluation = row
        loss = number(row, "loss")
        if loss is None:
            return
        self.evaluations.offer((row["step"], loss))
        if self.best is None or loss < self.best["loss"]:
            self.best = row


class MetricsFile:
    """The metrics.jsonl of a run, which may grow, be truncated by a resume, be replaced or be missing."""

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        self.metrics = Metrics()
        self.position = 0
        self.size = 0
        self._before = b""
        """The last bytes before the position."""
        self._partial = b""
        """The beginning of a line whose end is not written yet."""
        self._in_endless_line = False

    @property
    def has_more(self) -> bool:
        """Whether more has been written than was read so far."""
        return self.position < self.size

    def read(self, path: Path, budget: int) -> None:
        """Read what is new, `budget` bytes at most; a file that is not the one read before, from its beginning.

        Raises:
            OSError: It cannot be read.
        """
        check_regular(path)
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            self._start_over()
            return
        with file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < self.position or not self._continues(file.fileno()):
                self._start_over()
                self.size = os.fstat(file.fileno()).st_size
            file.seek(self.position)
            while budget > 0 and (piece := file.read(min(PIECE, budget))):
                budget -= len(piece)
                self.position += len(piece)
                self._before = (self._before + piece)[-OVERLAP:]
                self._take(piece)
            self.size = max(self.size, self.position)

    def _continues(self, descriptor: int) -> bool:
        """Whether the bytes before the position are those that were read: another file's have other times."""
        start = self.position - len(self._before)
        return os.pread(descriptor, len(self._before), start) == self._before

    def _take(self, piece: bytes) -> None:
        """Parse the complete lines; of frequent kinds only those that curves keep and the newest."""
        lines = (self._partial + piece).split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) > MAX_LINE:
            self._partial = b""
            self.metrics.damaged += not self._in_endless_line
            self._in_endless_line = True
        if lines and self._in_endless_line:
            del lines[0]
            self._in_endless_line = False
        kinds = [line[KIND] if line.startswith(FREQUENT) else b"" for line in lines]
        remaining = Counter(kinds)
        for line, kind in zip(lines, kinds, strict=True):
            if kind:
                remaining[kind] -= 1
                if remaining[kind] >= WINDOW and self._skips(kind):
                    continue
            self._add_line(line)

    def _skips(self, kind: bytes) -> bool:
        """Whether a line of a frequent kind that is not among the newest need not be parsed."""
        is_skipped = kind != FREQUENT[0][KIND] or self.metrics.train.skip()
        self.metrics.lines += is_skipped
        return is_skipped

    def _add_line(self, line: bytes) -> None:
        if not line.strip():
            return
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line, parse_constant=_finite, parse_float=_finite)
        if isinstance(row, dict) and isinstance(row.get("kind"), str) and _is_step(row.get("step")):
            self.metrics.add(row)
        else:
            self.metrics.damaged += 1


def number(row: Row | None, key: str) -> float | None:
    """Return the finite number that a row has under a key."""
    value = row.get(key) if row else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def _finite(text: str) -> float | None:
    """Return a number; None for NaN, the infinities and one beyond the range of floats."""
    value = float(text)
    return value if math.isfinite(value) else None


def _point(row: Row) -> TrainPoint:
    return TrainPoint(row["step"], *(number(row, key) for key in TrainPoint._fields[1:]))


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _keep(rows: dict[str, Row], key: str, row: Row) -> None:
    rows.pop(key, None)
    rows[key] = row
    if len(rows) > MAX_TEXTS:
        del rows[next(iter(rows))]
