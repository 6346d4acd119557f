"""A worker as a child process, the memory of it and everything it starts, and a Hub beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
SAMPLE_INTERVAL = 0.1
"""Seconds between two samples of memory."""


def run_worker(
    contender: str, task: str, root: Path, hub: tuple[str, str] | None = None, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a worker; return its answer and `peak_mebibytes`. `hub`: the data set's name and the Hub's address."""
    with tempfile.TemporaryDirectory() as scratch:
        options_given = {"contender": contender, "task": task, "root": root, "scratch": scratch, **(options or {})}
        environment = {**os.environ, "PYTHONPATH": f"{HERE}:{TESTS}", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"HF_HOME": str(Path(scratch) / "hf"), "HF_HUB_DISABLE_XET": "1"}
        if hub:
            options_given["hub"], environment["HF_ENDPOINT"] = hub
        words = [word for name, value in options_given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        process = subprocess.Popen(
            [sys.executable, HERE / "worker.py", *words], env=environment, stdout=subprocess.PIPE, text=True
        )
        with peak_memory(process.pid) as peak:
            out, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{contender} at {task} ended with {process.returncode}")
        return {**json.loads(out.splitlines()[-1]), "peak_mebibytes": max(peak) >> 10}


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Sample the memory of a process and its descendants, in KiB; shared pages count once (Linux's PSS)."""
    stop, sizes = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(SAMPLE_INTERVAL):
            sizes.append(sum(map(_proportional_size, _family(pid))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


def _family(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended meanwhile
        return []
    return [pid, *(member for child in children for member in _family(child))]


def _proportional_size(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def fake_hub(root: Path, latency: float) -> Iterator[str]:
    """Serve the data sets below `root` from a fake Hub in a process of its own; yield its address."""
    command = [sys.executable, "-m", "fake_hub", "--root", str(root), "--latency", str(latency)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().strip().split("=", 1)[1]
    finally:
        process.terminate()
        process.wait()
