"""A status on a terminal: what fits its size, the most important first."""

from __future__ import annotations

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.terminal import escaped
from orchestrator.watch import chart, wording
from orchestrator.watch.chart import Series
from orchestrator.watch.status import State, Status
from orchestrator.watch.wording import Fact

STYLES = {
    State.RUNNING: "bold green",
    State.ENDED: "bold green",
    State.STARTING: "bold yellow",
    State.NOT_STARTED: "bold yellow",
    State.STOPPED: "bold yellow",
    State.FAILED: "bold red",
    State.SILENT: "bold red",
    State.KILLED: "bold red",
    State.REMOVED: "bold red",
}
MIN_WIDTH, MIN_HEIGHT = 60, 20
"""The smallest terminal that panels are drawn on, in columns and rows; a smaller one gets lines."""
WIDE, TALL = 120, 32
"""The smallest terminal with room for smaller charts beside that of the loss, in columns and rows."""
HEADER = 2
MIN_BAR = 10
FRAME = 2
"""Rows or columns that the border of a panel takes."""
SMALL_FACTS = 5
"""Facts in a panel of a small terminal."""


class Screen:
    """A status that fills the terminal, drawn for the size that it has at that moment."""

    def __init__(self, status: Status, note: str, unicode: bool) -> None:
        self.status, self.note, self.unicode = status, note, unicode

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what fits."""
        width, height = options.max_width, options.height or console.height
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            yield _lines(self.status, self.note, width, height)
            return
        yield _layout(self.status, self.note, width, height, self.unicode)


def _lines(status: Status, note: str, width: int, height: int) -> RenderableType:
    """Return facts only, cut to the size."""
    facts = [*wording.learning(status), *wording.speed(status), *wording.machine(status), *wording.files(status)]
    lines = [_headline(status), Text(wording.progress(status))]
    lines += [Text(text, style="yellow") for text in wording.warnings(status)[:2]]
    lines += [_fact(fact) for fact in facts]
    lines = [*lines[: max(1, height - 1)], Text(note, style="dim")][:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _layout(status: Status, note: str, width: int, height: int, unicode: bool) -> Layout:
    """Return header, charts, facts, messages and a last line."""
    is_large = width >= WIDE and height >= TALL
    facts = _facts(status, is_large)
    facts_height = max(len(part) for _, part in facts) + FRAME
    messages = _messages(status, is_large)
    if len(_headline(status)) > width:
        messages.insert(0, Text(escaped(status.detail), style="yellow"))
    remaining_height = height - HEADER - facts_height - 1
    wrapped = _wrapped(messages, width - 4)
    messages_height = min(len(wrapped) + FRAME, max(3, remaining_height * 2 // 5 + 1))
    frame = box.ROUNDED if unicode else box.ASCII
    charts_height = remaining_height - messages_height
    layout = Layout()
    layout.split_column(
        Layout(_header(status, width), size=HEADER),
        Layout(_charts(status, width, charts_height, is_large, frame, unicode), size=charts_height),
        Layout(_row([_panel(title, Group(*map(_fact, part)), frame) for title, part in facts]), size=facts_height),
        Layout(_panel("messages", _cut(wrapped, messages_height - FRAME), frame), size=messages_height),
        Layout(Text(note, style="dim", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout


def _header(status: Status, width: int) -> RenderableType:
    """Return the state, and below it the progress with a bar."""
    progress = Text(wording.progress(status), style="bold", no_wrap=True, overflow="ellipsis")
    total, room = status.total_steps, width - len(progress) - 1
    below: RenderableType = progress
    if total and room >= MIN_BAR:
        below = Table.grid(padding=(0, 1, 0, 0))
        below.add_row(progress, ProgressBar(total=total, completed=min(status.step, total), width=room - 1))
    return Group(_headline(status), below)


def _headline(status: Status) -> Text:
    text = Text(wording.headline(status), no_wrap=True, overflow="ellipsis")
    start = text.plain.index(": ", len(escaped(status.name))) + 2
    text.stylize("bold", 0, start)
    text.stylize(STYLES[status.state], start, start + len(status.state.value))
    return text


def _charts(status: Status, width: int, height: int, is_large: bool, frame: box.Box, unicode: bool) -> RenderableType:
    """Return the losses, and on a large terminal learning rate, gradient norm and speed beside them."""
    loss = wording.loss_series(status, unicode)
    if not is_large:
        return _chart(wording.loss_title(unicode), loss, width, height, frame, unicode)
    small = [("learning_rate", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_second", "tokens/s")]
    narrow = width // 3
    layout, column = Layout(), Layout(size=narrow)
    rows = height // len(small)
    heights = [rows] * (len(small) - 1) + [height - rows * (len(small) - 1)]
    column.split_column(
        *(
            Layout(_chart(title, [_small(status, key)], narrow, tall, frame, unicode), size=tall)
            for (key, title), tall in zip(small, heights, strict=True)
        )
    )
    main = _chart(wording.loss_title(unicode), loss, width - narrow, height, frame, unicode)
    layout.split_row(Layout(main, size=width - narrow), column)
    return layout


def _small(status: Status, key: str) -> Series:
    return Series(wording.curve(status, key), "green", from_zero=key != "grad_norm")


def _chart(title: str, series: list[Series], width: int, height: int, frame: box.Box, unicode: bool) -> Panel:
    lines = chart.draw(series, width - 2 * FRAME, max(1, height - FRAME), unicode)
    return _panel(title, Group(*lines), frame)


def _facts(status: Status, is_large: bool) -> list[tuple[str, list[Fact]]]:
    """Return the panels of facts; on a small terminal two, the machine's without what is not known."""
    learning, speed, machine = wording.learning(status), wording.speed(status), wording.machine(status)
    if is_large:
        return [("learning", learning), ("speed", speed), ("machine", machine)]
    if status.utilization is not None:
        # The GPU's use and memory, or the process's, tell more than the parts for saving and evaluating.
        speed = [*speed[:3], *machine[:2], *speed[3:]]
    return [("learning", learning[:SMALL_FACTS]), ("speed", speed[:SMALL_FACTS])]


def _messages(status: Status, is_large: bool) -> list[Text]:
    """Return the directory, checkpoints, warnings and the last sample, a line each."""
    files = wording.files(status)
    if is_large:
        lines = [_fact(("directory", str(status.directory.absolute()))), *map(_fact, files)]
    else:
        lines = [_fact((files[0][0], "; ".join([files[0][1], *(f"{name} {text}" for name, text in files[1:])])))]
    lines += [Text(text, style="yellow") for text in wording.warnings(status)]
    sample_parts = wording.sample(status)
    if sample_parts is None:
        return lines
    title, prompt, text = sample_parts
    if is_large:
        text_lines = Text.assemble((prompt, "bold"), text)
        return [*lines, Text(title, style="cyan"), *text_lines.split("\n", allow_blank=True)]
    return [*lines, _one_line(Text.assemble((f"{title}: ", "cyan"), " ".join(f"{prompt}{text}".split())))]


def _wrapped(lines: list[Text], width: int) -> list[Text]:
    console = Console(width=max(1, width), color_system=None)
    return [part for line in lines for part in ([line] if line.no_wrap else line.wrap(console, max(1, width)))]


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _cut(lines: list[Text], height: int) -> RenderableType:
    """Return as many lines as fit; what is left out is counted."""
    if len(lines) > height:
        lines = [*lines[: height - 1], Text(f"... {len(lines) - height + 1} more lines", style="dim")]
    return Group(*lines)


def _fact(fact: Fact) -> Text:
    name, text = fact
    return Text.assemble((f"{name:<{wording.LABEL_WIDTH}}", "cyan"), escaped(text), no_wrap=True, overflow="ellipsis")


def _row(panels: list[Panel]) -> Layout:
    layout = Layout()
    layout.split_row(*(Layout(panel) for panel in panels))
    return layout


def _panel(title: str, content: RenderableType, frame: box.Box) -> Panel:
    return Panel(content, title=Text(title, style="bold"), title_align="left", box=frame, border_style="dim")
