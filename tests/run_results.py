"""What an interrupted run must have in common with an undisturbed one: everything but the times that it took.

`TIMINGS` is the one list of what may differ; every other byte of a run's directory must not.
"""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

TIMINGS = {
    "tokens_per_second", "positions_per_second", "mfu", "step_seconds", "data_wait_seconds", "save_seconds",
    "evaluation_seconds",
}  # fmt: skip
"""Keys of `metrics.jsonl`, and tags of TensorBoard, whose values are measured times."""
MEASURED_KINDS = {"utilization", "advice"}
"""Kinds of lines that say how busy the machine was; TensorBoard has them as `system/...`."""
EVENTS = "events.out.tfevents."
OF_A_PROCESS = {".trainer.lock", "environment.json"}
"""Files that name the process or the machine of the last session."""


def run_results(run: Path) -> dict[str, bytes]:
    """Return all that a run's directory, or one with runs in it, holds, less times; leftovers are there too."""
    contents: dict[str, bytes] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            contents[name] = f"-> {path.readlink()}".encode()
        elif path.name.startswith(EVENTS):
            name = name.replace(path.name, "events")
            assert name not in contents, f"a run has one event file: {path.parent}"
            contents[name] = _events(path)
        elif path.is_file() and path.name not in OF_A_PROCESS:
            contents[name] = _without_times(path) if path.name == "metrics.jsonl" else path.read_bytes()
    return contents


def differences(results: dict[str, bytes], undisturbed: dict[str, bytes]) -> list[str]:
    """Return the paths of what differs."""
    return sorted(name for name in results.keys() | undisturbed.keys() if results.get(name) != undisturbed.get(name))


def _without_times(metrics: Path) -> bytes:
    """Return the lines of a file of metrics without measured times. The order of keys counts."""
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] not in MEASURED_KINDS]
    return "\n".join(json.dumps({k: v for k, v in row.items() if k not in TIMINGS}) for row in rows).encode()


def _events(file: Path) -> bytes:
    """Return step, tag and value of every event, without wall times and measured ones."""
    lines = []
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.tag not in TIMINGS and not value.tag.startswith("system/"):
                lines.append(f"{event.step} {value.tag} {value.tensor.SerializeToString().hex()}")
    return "\n".join(lines).encode()
