"""A part of the GPU session: a process with a time limit, whose result is JSON among what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
# An optimizer step of 1.1 PFLOP, until one has been measured.
ASSUMED_STEP_SECONDS = 10.0
# How long a command may take to exit after its budget.
GRACE_SECONDS = 15.0
# How long a killed process may take to end: one that the driver holds is left behind.
KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Duration:
    """A fixed number of seconds plus a number of optimizer steps."""

    seconds: float
    steps: int = 0

    def to_seconds(self, step: float) -> float:
        """Return the duration in seconds, if a step takes `step` seconds."""
        return self.seconds + self.steps * step


@dataclass(frozen=True)
class Part:
    """A command that prints lines of JSON: the fastest of those with tokens per second is its result, else the last."""

    name: str
    command: list[str]
    limit: Duration
    # Not started if less time than this is left.
    minimum: Duration = Duration(GRACE_SECONDS)
    # Whether the command accepts its budget as --seconds, and exits by itself.
    budgeted: bool = False
    # How long it may take to do so after its budget, besides the step in progress.
    grace: float = GRACE_SECONDS


@dataclass
class Measured:
    """Measurements of the parts so far, by which later parts are sized."""

    # Seconds per optimizer step.
    step: float = ASSUMED_STEP_SECONDS
    # Nominal FLOPs per second of the GPU, as our program reports them.
    peak_flops: float | None = None


@dataclass
class PartResult:
    """Result of a part, as results.json stores it."""

    part: str
    # None if it was not run.
    seconds: float | None
    failure: str | None
    result: dict[str, Any] = field(default_factory=dict)
    # Every JSON object that it printed, in order, if there are several.
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the part was run and failed."""
        return self.seconds is not None and (self.failure is not None or self.result.get("passed") is False)


def fit_to_budget(part: Part, measured: Measured, remaining: float) -> tuple[list[str], float] | None:
    """Return the command with its budget, and its time limit in seconds; None if too little time is left."""
    if remaining < part.minimum.to_seconds(measured.step):
        return None
    limit = part.limit.to_seconds(measured.step)
    if not part.budgeted:
        return part.command, min(limit, remaining)
    command = [*part.command, "--seconds", f"{max(1.0, min(limit, remaining - part.grace)):.0f}"]
    if measured.peak_flops and part.name.startswith("torch"):
        command += ["--peak", f"{measured.peak_flops:.0f}"]
    return command, min(limit + part.grace + measured.step, remaining)


def update_measured(measured: Measured, result: dict[str, Any]) -> None:
    """Take from a result the measurements that size later parts."""
    if result.get("tokens_per_second") and result.get("tokens_per_step"):
        measured.step = result["tokens_per_step"] / result["tokens_per_second"]
    measured.peak_flops = result.get("nominal_flops_per_second") or measured.peak_flops


def run(part: Part, measured: Measured, remaining: float, environment: dict[str, str], log: Path) -> PartResult:
    """Run a part if time is left for it."""
    fitted = fit_to_budget(part, measured, remaining)
    if fitted is None:
        minimum = part.minimum.to_seconds(measured.step)
        return PartResult(
            part.name, None, f"no time left: it needs {minimum:.0f} s, and there are {max(remaining, 0):.0f}"
        )
    command, seconds = fitted
    print(f"{part.name} ...", flush=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        before = output.tell()
        begin = time.monotonic()
        failure = run_command(command, seconds, environment, output)
        took = time.monotonic() - begin
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    rows = list(json_objects(lines))
    result = result_of(rows)
    if failure and lines:
        failure = f"{failure}: {failure_reason(lines[-1])[:100]}"
    elif not failure and not result:
        failure = "printed no result"
    update_measured(measured, result)
    return PartResult(part.name, round(took, 1), failure, result, rows if len(rows) > 1 else [])


def json_objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects."""
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest of the rows with tokens per second, else the last row."""
    timed = [row for row in rows if row.get("tokens_per_second")]
    return max(timed, key=lambda row: float(row["tokens_per_second"])) if timed else (rows or [{}])[-1]


def failure_reason(line: str) -> str:
    """Return the last line of a failed part, or the first failed row if that line is a report of gpu-check."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        failed = next((row for row in json.loads(line)["rows"] if row["failure"]), None)
        return f"{failed['check']}: {failed['failure']}" if failed else line
    return line


def run_command(command: list[str], seconds: float, environment: dict[str, str], output: IO[str]) -> str | None:
    """Run a command with a time limit; return how it failed, None if it did not."""
    try:
        # In its own process group, so that compilers started by PyTorch are killed with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    except OSError as error:
        return f"cannot be started: {error}"
    try:
        code = process.wait(timeout=seconds)
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        # Also when the session itself is stopped.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_SECONDS)
