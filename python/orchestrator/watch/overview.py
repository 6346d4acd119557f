"""`orchestrate runs`: all runs in a table, from their files."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator import _native, terminal
from orchestrator.paths import Roots, shown
from orchestrator.screen import amount, duration, loss_text, table
from orchestrator.watch import trainer_lock
from orchestrator.watch.metrics_file import MetricsFile, number
from orchestrator.watch.run_directory import METRICS
from orchestrator.watch.status import State, Status, assess

HEADINGS = ("run", "state", "step", "loss", "held-out", "size", "age")
STATES = {State.ENDED: "finished", State.KILLED: "failed", State.STARTING: "running"}
"""The states of `watch` that have another name here."""


def run(is_json: bool) -> None:
    """Print one line per run, the one that was written to last first."""
    rows = [_row(folder) for folder in _native.runs()]
    if is_json:
        for row in rows:
            terminal.result(json.dumps(row))
    elif rows:
        terminal.result(table([HEADINGS, *map(_cells, rows)]))
    else:
        terminal.result(f"there are no runs in {shown(Roots.from_environment().runs)}")


def _row(folder: Path) -> dict[str, Any]:
    """Return the figures of a run; None for what it has none of."""
    status = _status(folder)
    train, evaluation = status.train, status.metrics.evaluation
    return {
        "run": status.name,
        "directory": str(folder.absolute()),
        "state": STATES.get(status.state, status.state.value),
        "step": status.step,
        "total_steps": status.total_steps,
        "loss": number(train, "loss") if train else None,
        "evaluation_loss": number(evaluation, "loss") if evaluation else None,
        "bytes": _size(folder),
        "age_seconds": status.line_age,
    }


def _status(folder: Path) -> Status:
    file = MetricsFile()
    with suppress(OSError):
        file.read(folder / METRICS, sys.maxsize)
    return assess(folder, file.metrics, trainer_lock.ask(folder), removed=False, now=time.time())


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, each once; what vanishes or cannot be read counts as none."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = Path(parent, name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    total = f" of {row['total_steps']:,}" if row["total_steps"] else ""
    losses = ("" if loss is None else loss_text(loss) for loss in (row["loss"], row["evaluation_loss"]))
    age = "" if row["age_seconds"] is None else duration(row["age_seconds"])
    return row["run"], row["state"], f"{row['step']:,}{total}", *losses, amount(row["bytes"]), age
