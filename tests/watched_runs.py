"""Run directories made by hand, with lines of every kind that a trainer writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
UTILIZATION = {
    "rss_bytes": 3_100_000_000, "cpu_cores": 1.93, "swap_bytes": 0, "gpu_utilization": 0.98,
    "gpu_memory_bytes": 30_100_000_000, "gpu_memory_total_bytes": 33_700_000_000, "gpu_power_watts": 561.0,
    "gpu_power_limit_watts": 575.0, "gpu_temperature_celsius": 71, "gpu_clock_mhz": 2610, "gpu_throttle": None,
}  # fmt: skip


def train_row(step: int, **other: object) -> Row:
    return {
        "kind": "train", "step": step, "loss": 3 + 5 * math.exp(-step / 40), "learning_rate": 3e-4, "grad_norm": 0.6,
        "tokens": step * 4096, "tokens_per_second": 23_800.0, "mfu": 0.77, "step_seconds": 2.0,
        "data_wait_seconds": 0.1, "save_seconds": 0.0, "evaluation_seconds": 0.0, "memory_bytes": 1 << 30, **other,
    }  # fmt: skip


def train_rows(steps: int, everything: bool = False) -> list[Row]:
    """Return the rows of a run of `steps` steps; with `everything` also other kinds of rows, every 50 steps."""
    rows: list[Row] = []
    for step in range(1, steps + 1):
        rows.append(train_row(step))
        if everything and step % 50 == 0:
            evaluation = {"loss": 3.1 + 5 * math.exp(-step / 40), "perplexity": 30.0, "bits_per_byte": 1.1, "tokens": 9}
            rows += [
                {"kind": "evaluation", "step": step, **evaluation},
                {"kind": "utilization", "step": step, "time": 1.7e9 + 2 * step, **UTILIZATION},
                {"kind": "sample", "step": step, "prompt": "Once upon", "text": " a time\nthere was a run."},
            ]
        if everything and step == steps // 2:
            rows.append({"kind": "advice", "step": step, "text": "the GPU is held back by its power limit."})
    return rows


def as_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def write_run(run: Path, rows: Iterable[Row], checkpoints: Iterable[int] = (), best: int | None = None) -> Path:
    """Write a run directory, whose lock nobody holds."""
    run.mkdir(parents=True, exist_ok=True)
    (run / ".trainer.lock").write_text("")
    (run / "resolved_config.json").write_text(json.dumps({"scheduler": {"total_steps": 1000}}))
    for step in checkpoints:
        path = run / "checkpoints" / f"step-{step:08}"
        path.mkdir(parents=True)
        (path / "MANIFEST.json").write_text("{}")
        (path.parent / "latest").write_text(f"{path.name}\n")
    if best is not None:
        (run / "checkpoints" / "best").write_text(f"step-{best:08}\n")
    (run / "metrics.jsonl").write_text(as_lines(rows))
    return run
