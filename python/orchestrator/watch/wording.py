"""A status as text: the facts that the live panel and plain text share, and the text of `--once`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from orchestrator.screen import amount, duration, loss_text
from orchestrator.terminal import escaped
from orchestrator.watch import chart
from orchestrator.watch.checkpoints import Checkpoint
from orchestrator.watch.metrics_file import Row, TrainPoint, number
from orchestrator.watch.status import State, Status

Fact = tuple[str, str]
"""A label and its text."""

LABEL_WIDTH = 14
CHART_HEIGHT = 12
UNKNOWN = "-"


def headline(status: Status) -> str:
    """Return the name and the state: `demo: running, process 4242 on this machine`."""
    return escaped(f"{status.name}: {status.state.value}{_tail(status)}")


def _tail(status: Status) -> str:
    if not status.detail:
        return ""
    return f" {status.detail}" if status.state in (State.KILLED, State.STOPPED) else f", {status.detail}"


def progress(status: Status) -> str:
    """Return the progress: `step 1,260 of 2,000, 63.0 %, stage 2 of 3, ETA 3 min 20 s (14:05)`."""
    parts = [f"step {status.step:,}"]
    if status.total_steps and status.progress is not None:
        parts[0] += f" of {status.total_steps:,}"
        parts.append(f"{100 * status.progress:.1f} %")
    if status.stage is not None and len(status.stages) > 1:
        parts.append(f"stage {status.stage + 1} of {len(status.stages)}")
    if status.eta is not None:
        ends = datetime.fromtimestamp(status.now + status.eta)
        when = f"{ends:%H:%M}" if status.eta < 86_400 else f"{ends:%Y-%m-%d}"
        parts.append(f"ETA {duration(status.eta)} ({when})")
    return ", ".join(parts)


def learning(status: Status) -> list[Fact]:
    """Return losses, learning rate and gradient norm."""
    train, evaluation, best = status.train, status.metrics.evaluation, status.metrics.best
    return [
        ("loss", _loss(status)),
        ("held-out loss", _held_out(evaluation)),
        ("best", _held_out(best)),
        ("learning rate", _formatted(number(train, "learning_rate"), ".3g")),
        ("gradient norm", _formatted(number(train, "grad_norm"), ".3g")),
        ("bits per byte", _formatted(number(evaluation, "bits_per_byte"), ".3f")),
    ]


def speed(status: Status) -> list[Fact]:
    """Return tokens per second, MFU and the parts of a step's time; of several ranks exchange and the slowest too."""
    mfu, seconds, shares = number(status.train, "mfu"), status.seconds_per_step, status.shares
    part = {name: f"{100 * share:.1f} %" for name, share in shares.items()}
    step = UNKNOWN if seconds is None else f"{_step_time(seconds)}, compute {100 * shares.get('compute', 1):.0f} %"
    return [
        ("tokens/s", _rates(status) if mfu is None else f"{_rates(status)}, MFU {100 * mfu:.1f} %"),
        ("step", step),
        ("data wait", part.get("data_wait", UNKNOWN)),
        *_ranks(status),
        ("save", part.get("save", UNKNOWN)),
        ("evaluation", part.get("evaluation", UNKNOWN)),
        ("tokens", _formatted(number(status.train, "tokens"), ",.0f")),
    ]


def _ranks(status: Status) -> Iterable[Fact]:
    """Yield the share of a step spent in exchange, and the slowest rank: `3 on node-1, 1.40 times the median`."""
    ranks = status.ranks
    if ranks is None:
        return
    yield "exchange", f"{100 * status.shares.get('exchange', 0):.1f} % of {len(ranks.compute_seconds)} ranks"
    where = "" if ranks.host is None else f" on {ranks.host}"
    others = "the other" if len(ranks.compute_seconds) == 2 else "the median"
    ratio = UNKNOWN if ranks.ratio is None else f"{ranks.ratio:.2f} times {others}"
    yield "slowest rank", f"{ranks.slowest}{where}, {ratio}"


def _step_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def machine(status: Status) -> list[Fact]:
    """Return the last sample of the GPU and the process, or of all ranks."""
    row = status.utilization
    if row is None:
        return [("process", "not recorded")]
    largest = number(row, "max_rank_rss_bytes")
    if largest is None:
        return [*_gpu(row), ("process", _process(row))]
    return [*_gpu(row), ("ranks", f"{_process(row)}, at most {amount(int(largest))} each")]


def _gpu(row: Row) -> Iterable[Fact]:
    utilization, clock = number(row, "gpu_utilization"), number(row, "gpu_clock_mhz")
    if utilization is None:
        return
    yield "GPU", f"{100 * utilization:.0f} %" if clock is None else f"{100 * utilization:.0f} %, {clock:,.0f} MHz"
    memory, total = number(row, "gpu_memory_bytes"), number(row, "gpu_memory_total_bytes")
    if memory is not None:
        yield "GPU memory", amount(int(memory)) if total is None else f"{amount(int(memory))} of {amount(int(total))}"
    power, limit = number(row, "gpu_power_watts"), number(row, "gpu_power_limit_watts")
    parts = [] if power is None else [f"{power:.0f} W" if limit is None else f"{power:.0f} of {limit:.0f} W"]
    heat = number(row, "gpu_temperature_celsius")
    parts += [] if heat is None else [f"{heat:.0f} °C"]
    if parts:
        yield "GPU power", ", ".join(parts)
    if row.get("gpu_throttle"):
        yield "GPU throttled", str(row["gpu_throttle"])


def _process(row: Row) -> str:
    cores, memory, swap = (number(row, key) for key in ("cpu_cores", "rss_bytes", "swap_bytes"))
    parts = [] if cores is None else [f"{cores:.2f} cores"]
    parts += [] if memory is None else [amount(int(memory))]
    parts += [f"{amount(int(swap))} of swap"] if swap else []
    return ", ".join(parts) or UNKNOWN


def files(status: Status) -> list[Fact]:
    """Return the checkpoints, and the age of the last line."""
    facts = [("checkpoint", _checkpoint(status.latest, status.now) if status.latest else "none yet")]
    if status.best is not None and (status.latest is None or status.best.step != status.latest.step):
        facts.append(("best kept", _checkpoint(status.best, status.now)))
    facts += _skipped(status.metrics.data)
    if status.line_age is not None:
        facts.append(("last line", f"{duration(status.line_age)} ago"))
    return facts


def _skipped(row: Row | None) -> Iterable[Fact]:
    """Yield the rows that were skipped, `5 of 800: 5 empty`, and the number of corrupted files."""
    if count := number(row, "skipped_rows"):
        of = _formatted(number(row, "rows"), ",.0f")
        yield "rows skipped", escaped(f"{count:,.0f} of {of}: {row.get('skipped') if row else ''}")
    if files := number(row, "bad_files"):
        yield "corrupted", f"{files:,.0f} file{'' if files == 1 else 's'}, skipped as far as unreadable"


def _checkpoint(checkpoint: Checkpoint, now: float) -> str:
    age = duration(max(0.0, now - checkpoint.saved_at))
    return f"step {checkpoint.step:,}, {age} ago"


def warnings(status: Status) -> list[str]:
    """Return the warnings about the run and its files, then the trainer's advice, the newest first."""
    advice = [f"step {row['step']:,}: {row.get('text', '')}" for row in reversed(status.metrics.advice.values())]
    return [escaped(text) for text in (*status.warnings, *advice)]


def sample(status: Status) -> tuple[str, str, str] | None:
    """Return the last text that the run generated: its title, the prompt, the completion."""
    row = status.sample
    if row is None:
        return None
    prompt, text = (escaped(str(row.get(key) or "")) for key in ("prompt", "text"))
    return f"sample of step {row['step']:,}", prompt, text


def loss_series(status: Status, unicode: bool) -> list[chart.Series]:
    """Return the smoothed training loss and the held-out losses."""
    train = chart.smoothed(curve(status, "loss"))
    evaluations = [(float(step), loss) for step, loss in status.metrics.evaluations.points]
    return [chart.Series(train, "cyan"), chart.Series(evaluations, "bold yellow", "●" if unicode else "o")]


def curve(status: Status, key: str) -> list[chart.Point]:
    """Return the points of a curve: the values of a field of `TrainPoint` by step."""
    index = TrainPoint._fields.index(key)
    values = ((float(point.step), point[index]) for point in status.metrics.train_points())
    return [(step, value) for step, value in values if value is not None]


def loss_title(unicode: bool) -> str:
    """Return the title of the chart of losses."""
    return f"loss: training, smoothed, and held-out ({'●' if unicode else 'o'}), nats per token"


def line(status: Status) -> str:
    """Return a status as one line, for a log."""
    parts = [headline(status), progress(status), f"loss {_loss(status)}"]
    if status.metrics.evaluation is not None:
        parts.append(f"held-out loss {_held_out(status.metrics.evaluation)}")
    parts.append(_rates(status, " tokens/s"))
    return "  ".join(parts)


def plain(status: Status, width: int, unicode: bool) -> str:
    """Return a status as text for people and scripts: a fact per line, then the chart, the sample and the warnings."""
    facts = [("directory", escaped(str(status.directory.absolute()))), ("progress", progress(status))]
    for part in (learning(status), speed(status), machine(status), files(status)):
        facts += part
    lines = [headline(status), *(f"{name:<{LABEL_WIDTH}}{escaped(text)}" for name, text in facts)]
    lines += [f"{'warning':<{LABEL_WIDTH}}{text}" for text in warnings(status)]
    if status.metrics.train.points:
        chart_rows = chart.draw(loss_series(status, unicode), width, CHART_HEIGHT, unicode)
        lines += ["", loss_title(unicode), *(row.plain.rstrip() for row in chart_rows)]
    sample_parts = sample(status)
    if sample_parts is not None:
        title, prompt, text = sample_parts
        lines += ["", title, *(f"  {row}" for row in f"{prompt}{text}".split("\n"))]
    return "\n".join(lines)


def _loss(status: Status) -> str:
    last = number(status.train, "loss")
    if last is None:
        return UNKNOWN
    curve_of_loss = chart.smoothed(curve(status, "loss"))
    return f"{loss_text(last)}, smoothed {loss_text(curve_of_loss[-1][1], 3)}"


def _held_out(evaluation: Row | None) -> str:
    loss = number(evaluation, "loss")
    if evaluation is None or loss is None:
        return UNKNOWN
    return f"{loss_text(loss)} at step {evaluation['step']:,}"


def _rates(status: Status, unit: str = "") -> str:
    """Return tokens per second, beside positions per second where not every position has a target."""
    tokens, positions = status.median("tokens_per_second"), status.median("positions_per_second")
    rate = _formatted(tokens, ",.0f") + unit
    return (
        rate if tokens is None or positions is None or positions <= tokens else f"{rate} ({positions:,.0f} positions/s)"
    )


def _formatted(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
