"""Curves as text: braille dots on terminals with Unicode, asterisks elsewhere, with labelled axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

Point = tuple[float, float]

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character's dots, by row and column."""
EARLY = 0.05
"""The fraction of a run, at its beginning, whose values may lie above the axis."""
MIN_POINTS_TO_CLIP = 40
ROWS_PER_TICK = 3
MARK_DISTANCE = 6
"""Columns between marks, at least."""
MIN_WIDTH, MIN_HEIGHT = 24, 3
SMOOTHING_SPANS = 30
"""A smoothed curve averages over its length divided by this."""


@dataclass(frozen=True)
class Series:
    """Points to draw: connected by a line, or each with a mark."""

    points: Sequence[Point]
    style: str
    mark: str | None = None
    from_zero: bool = False
    """Whether the value axis includes zero."""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on `cells` positions."""

    low: float
    high: float
    cells: int

    def position(self, value: float) -> int:
        """Return the position of a value, from 0."""
        part = (value - self.low) / (self.high - self.low)
        return min(self.cells - 1, max(0, int(part * self.cells)))


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return an exponential moving average without bias towards its first value, as TensorBoard draws it."""
    decay = 1 - 2 / (max(1.0, len(points) / SMOOTHING_SPANS) + 1)
    average, weight, curve = 0.0, 0.0, []
    for x, y in points:
        average, weight = decay * average + (1 - decay) * y, decay * weight + 1 - decay
        curve.append((x, average / weight))
    return curve


def draw(series: Sequence[Series], width: int, height: int, unicode: bool) -> list[Text]:
    """Return `height` lines of at most `width` columns: the curves, their scale on the left, the steps below."""
    points = [point for one in series for point in one.points]
    if not points or width < MIN_WIDTH or height < MIN_HEIGHT:
        return [Text("no values yet" if not points else "")] + [Text("")] * (height - 1)
    rows = height - 1
    low, high = _value_range([one.points for one in series])
    if any(one.from_zero for one in series):
        low, high = min(low, 0.0), max(high, 1e-9)
    ticks = _ticks(low, high, max(2, rows // ROWS_PER_TICK))
    labels = _labels(ticks)
    margin = max(map(len, labels)) + 1
    canvas = _Canvas(width - margin - 1, rows, unicode)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    canvas.scale(x_low, x_high if x_high > x_low else x_low + 1, low, high)
    for one in series:
        canvas.draw(one)
    at_row = {rows - 1 - Axis(low, high, rows).position(tick): label for tick, label in zip(ticks, labels, strict=True)}
    tick_mark, bar = ("┤", "│") if unicode else ("+", "|")
    lines = []
    for row in range(rows):
        axis = f"{at_row.get(row, ''):>{margin - 1}} {tick_mark if row in at_row else bar}"
        lines.append(Text(axis, style="dim").append_text(canvas.line(row)))
    return [*lines, Text(_steps_line(x_low, x_high, margin + 1, width), style="dim")]


class _Canvas:
    """Characters of two by four dots, or of one where there is no braille."""

    def __init__(self, columns: int, rows: int, unicode: bool) -> None:
        self.across, self.down = (2, 4) if unicode else (1, 1)
        self.columns, self.rows, self.unicode = columns, rows, unicode
        self.bits = [[0] * columns for _ in range(rows)]
        self.marks: dict[tuple[int, int], str] = {}
        self.styles: dict[tuple[int, int], str] = {}

    def scale(self, x_low: float, x_high: float, low: float, high: float) -> None:
        """Set the steps and values at the edges."""
        self.x = Axis(x_low, x_high, self.columns * self.across)
        self.y = Axis(low, high, self.rows * self.down)
        self.high = high

    def draw(self, series: Series) -> None:
        """Draw a line or marks; what is above the scale is left out."""
        if series.mark is not None:
            self._draw_marks(series, series.mark)
            return
        last: tuple[int, int] | None = None
        for x, y in series.points:
            here = self.x.position(x), self.y.position(y)
            if y > self.high:
                last = None
                continue
            for dot in _between(last or here, here):
                self._set(*dot, series.style)
            last = here

    def _draw_marks(self, series: Series, mark: str) -> None:
        """Draw marks from the last to the first; those that would hide the curve between them are left out."""
        last_column = self.columns + MARK_DISTANCE
        for x, y in reversed(series.points):
            cell = self._cell(self.x.position(x), self.y.position(y))
            if y <= self.high and last_column - cell[1] >= MARK_DISTANCE:
                self.marks[cell], self.styles[cell] = mark, series.style
                last_column = cell[1]

    def line(self, row: int) -> Text:
        """Return a row of characters."""
        text = Text()
        for column in range(self.columns):
            cell = row, column
            text.append(self.marks.get(cell) or self._character(self.bits[row][column]), self.styles.get(cell))
        text.rstrip()
        return text

    def _character(self, bits: int) -> str:
        if not bits:
            return " "
        return chr(0x2800 + bits) if self.unicode else "*"

    def _cell(self, x: int, y: int) -> tuple[int, int]:
        return self.rows - 1 - y // self.down, x // self.across

    def _set(self, x: int, y: int, style: str) -> None:
        row, column = self._cell(x, y)
        self.bits[row][column] |= DOTS[self.down - 1 - y % self.down][x % self.across]
        self.styles[row, column] = style


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Return the dots of a straight line, both ends included."""
    (x, y), (to_x, to_y) = start, end
    count = max(abs(to_x - x), abs(to_y - y))
    for part in range(count + 1):
        ratio = part / count if count else 0.0
        yield round(x + ratio * (to_x - x)), round(y + ratio * (to_y - y))


def _value_range(series: Iterable[Sequence[Point]]) -> tuple[float, float]:
    """Return the range of the value axis. High values at a run's beginning are left out if they flatten the curve."""
    points = [point for one in series for point in one]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    values = [y for _, y in points]
    later = [y for x, y in points if x >= first + EARLY * (last - first)]
    low, high = min(values), max(values)
    if len(values) >= MIN_POINTS_TO_CLIP and high - low > 2 * (max(later) - low) > 0:
        high = max(later)
    if high > low:
        return low, high
    margin = abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values within a range, 1, 2 or 5 times a power of ten apart: about `count`, two at least."""
    power = 10.0 ** math.ceil(math.log10((high - low) / count))
    for step in (power, power / 2, power / 5, power / 10):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first >= max(1, count // 2):
            break
    return [index * step for index in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    largest = max(map(abs, ticks))
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else largest
    if largest >= 1e6:
        return [f"{tick:.3g}" for tick in ticks]
    if largest < 1e-2:
        return [f"{tick:.1e}" if tick else "0" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(spacing) + 1e-9)) if spacing else 2
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _steps_line(low: float, high: float, margin: int, width: int) -> str:
    """Return the first and the last step, at the left and the right end of the axis."""
    left, right = f"step {low:,.0f}", f"{high:,.0f}"
    return " " * margin + left + right.rjust(max(1, width - margin - len(left)))
