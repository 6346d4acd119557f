"""The status of a run at one moment, from its files: state, progress, loss, speed, checkpoints, warnings."""

from __future__ import annotations

import contextlib
import enum
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.input_files import json_object
from orchestrator.paths import quoted
from orchestrator.screen import counted, duration
from orchestrator.watch import checkpoints, ranks
from orchestrator.watch.checkpoints import Checkpoint
from orchestrator.watch.metrics_file import Metrics, Row, number
from orchestrator.watch.ranks import Ranks
from orchestrator.watch.run_directory import CONFIG, METRICS, last_change
from orchestrator.watch.trainer_lock import Held, TrainerLock

BETWEEN = {"save": "save_seconds", "evaluation": "evaluation_seconds"}
"""Work between steps, and the keys of train rows for the seconds that it took since the row before."""
MIN_SILENCE = 60.0
"""Seconds without a line after which a run whose lock cannot be asked counts as silent, at least."""
SILENT_STEPS = 10
"""Steps that may take place without their line before a run counts as silent."""


class State(enum.Enum):
    """The state of a run."""

    NOT_STARTED = "not started"
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"
    SILENT = "silent"
    REMOVED = "removed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected unless somebody resumes the run."""
        return self in (State.STOPPED, State.ENDED, State.FAILED, State.KILLED, State.REMOVED)


class Stage(NamedTuple):
    """A stage of a run."""

    end: int
    """Its last step, if no stage before it lasts longer than the config says."""
    tokens_per_step: int


@dataclass(frozen=True)
class Status:
    """A run at one moment. Times are in seconds; what is not known is none."""

    directory: Path
    state: State
    detail: str
    """Who trains, why it ended, how to resume: a part of a sentence."""
    metrics: Metrics
    lock: TrainerLock
    step: int
    total_steps: int | None
    stages: list[Stage]
    """The stages of the config; empty for a run without stages."""
    latest: Checkpoint | None
    best: Checkpoint | None
    line_age: float | None
    """Seconds since the last line of metrics."""
    now: float
    warnings: list[str]

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.directory.absolute().name

    @property
    def progress(self) -> float | None:
        """The fraction of the steps that is done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    @property
    def stage(self) -> int | None:
        """The current stage, from 0; none for a run without stages."""
        if not self.stages:
            return None
        stage = self.metrics.stage.get("stage") if self.metrics.stage else 0
        return stage if type(stage) is int and 0 <= stage < len(self.stages) else None

    @property
    def _rows_of_stage(self) -> list[Row]:
        """The newest train rows of the current stage, whose steps take the time that the next ones will take."""
        first = self.metrics.stage["step"] if self.metrics.stage else 0
        return [row for row in self.metrics.recent if row["step"] >= first] or list(self.metrics.recent)

    @property
    def train(self) -> Row | None:
        """The last train row."""
        return self.metrics.recent[-1] if self.metrics.recent else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median step time of the last lines, with the time of saving and evaluating that a step takes on average."""
        step = self.median("step_seconds")
        between = (_between_steps(self.metrics, key) for key in BETWEEN.values())
        return None if step is None else step + sum(_present(between))

    @property
    def eta(self) -> float | None:
        """Seconds until the last step, while the run trains."""
        seconds = self.seconds_per_step
        if self.state is not State.RUNNING or not self.total_steps or seconds is None:
            return None
        return self._steps_left(self.total_steps) * seconds

    def _steps_left(self, total: int) -> float:
        """Return the steps left, converted into steps of the current stage by their numbers of tokens."""
        if self.stage is None:
            return max(0, total - self.step)
        current, step, remaining = self.stages[self.stage].tokens_per_step, self.step, 0.0
        for stage in self.stages[self.stage :]:
            remaining += max(0, min(stage.end, total) - step) * stage.tokens_per_step / current
            step = max(step, stage.end)
        return remaining

    def median(self, key: str) -> float | None:
        """Return the median of a number of the last steps; None for runs of before it was recorded."""
        values = _present(number(row, key) for row in self._rows_of_stage)
        return statistics.median(values) if values else None

    @property
    def ranks(self) -> Ranks | None:
        """The compute times of the ranks; None for a run of one process."""
        return ranks.of_rows(self._rows_of_stage, self.directory)

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of a step's time: computing, waiting for data, and what the trainer records of the rest."""
        step, wait = (_mean(self.metrics, key) for key in ("step_seconds", "data_wait_seconds"))
        exchange = _mean(self.metrics, "exchange_seconds")
        between = {share: _between_steps(self.metrics, key) for share, key in BETWEEN.items()}
        if not step or wait is None:
            return {}
        total = step + sum(_present(between.values()))
        compute = max(0.0, step - wait - (exchange or 0.0))
        seconds = {"compute": compute, "data_wait": wait, "exchange": exchange, **between}
        return {share: value / total for share, value in seconds.items() if value is not None}

    @property
    def utilization(self) -> Row | None:
        """The last sample of the GPU or the process."""
        return self.metrics.utilization[-1] if self.metrics.utilization else None

    @property
    def sample(self) -> Row | None:
        """The last text that the run generated."""
        return next(reversed(self.metrics.samples.values()), None)

    def after_removal(self, now: float) -> Status:
        """Return the same figures once the run's directory is gone."""
        age = None if self.line_age is None else self.line_age + now - self.now
        lock = replace(self.lock, held=Held.NO)
        return replace(self, state=State.REMOVED, detail="", lock=lock, line_age=age, now=now, warnings=[])


def assess(directory: Path, metrics: Metrics, lock: TrainerLock, removed: bool, now: float) -> Status:
    """Return the status of a run whose metrics have been read; `now` is in Unix seconds."""
    config = json_object(directory / "resolved_config.json")
    folder = checkpoints.directory_of(directory, config)
    latest = checkpoints.newest(folder)
    total = _section(config, "scheduler").get("total_steps")
    total = total if type(total) is int and total > 0 else None
    last_write = last_change(directory) if (directory / METRICS).exists() else None
    age = None if last_write is None else max(0.0, now - last_write)
    state, detail = _state(metrics, lock, latest, total, age) if not removed else (State.REMOVED, "")
    return Status(
        directory=directory,
        state=state,
        detail=detail,
        metrics=metrics,
        lock=lock,
        step=metrics.step,
        # A session without the longer --steps of the one before resolves the config's own number.
        total_steps=total and max(total, metrics.step),
        stages=_stages(config),
        latest=latest,
        best=checkpoints.named(folder, "best"),
        line_age=age,
        now=now,
        warnings=list(_warnings(directory, metrics, state, age, latest)),
    )


def _state(
    metrics: Metrics, lock: TrainerLock, latest: Checkpoint | None, total: int | None, age: float | None
) -> tuple[State, str]:
    """Return what the run is doing, and the rest of the sentence about it."""
    if lock.held is Held.YES:
        return (State.RUNNING if metrics.recent else State.STARTING), _trainer(lock)
    if metrics.end is not None:
        return _ended(metrics.end)
    if lock.held is Held.UNKNOWN and metrics.lines:
        return _judged_by_age(metrics, lock, age)
    if not metrics.recent:
        return (State.NOT_STARTED, "") if latest is None else (State.STOPPED, f"and saved at step {latest.step:,}")
    # A trainer that records the time of saving records its end as well; a loop in Python around `Trainer` does not.
    records_end = any("save_seconds" in row for row in metrics.recent)
    if latest is not None and latest.step >= metrics.step:
        if total is not None and metrics.step >= total:
            return State.ENDED, "all steps are done"
        if not records_end:
            return State.STOPPED, f"and saved at step {latest.step:,}"
    return State.KILLED, f"or failed after step {metrics.step:,}"


def _ended(end: Row) -> tuple[State, str]:
    reason = str(end.get("reason", "no reason is given"))
    if reason.startswith(State.STOPPED.value):
        return State.STOPPED, reason.removeprefix(State.STOPPED.value).strip()
    return (State.FAILED if number(end, "exit_code") else State.ENDED), reason


def _judged_by_age(metrics: Metrics, lock: TrainerLock, age: float | None) -> tuple[State, str]:
    """Return the state of a run on another machine, whose lock only that machine knows."""
    where = f"on {lock.host}" if lock.host else "on another machine"
    if age is None or age > _longest_silence(metrics):
        since = "" if age is None else f" for {duration(age)}"
        return State.SILENT, f"no line{since} {where}"
    return State.RUNNING, f"{where} as far as its files tell"


def _longest_silence(metrics: Metrics) -> float:
    """Return the seconds without a line that are usual for a run: some steps, a save and an evaluation."""
    step, save, evaluation = (
        max(_present(number(row, key) for row in metrics.recent), default=0.0)
        for key in ("step_seconds", "save_seconds", "evaluation_seconds")
    )
    steps = [row["step"] for row in metrics.recent]
    between_lines = max((later - step for step, later in pairwise(steps)), default=1)
    return max(MIN_SILENCE, (between_lines + SILENT_STEPS) * step + 2 * (save + evaluation))


def _trainer(lock: TrainerLock) -> str:
    where = "on this machine" if lock.is_on_this_machine else f"on {lock.host}"
    return where if lock.pid is None else f"process {lock.pid} {where}"


def _warnings(
    directory: Path, metrics: Metrics, state: State, age: float | None, latest: Checkpoint | None
) -> Iterable[str]:
    """Return what somebody who watches should know, one sentence each."""
    config = directory / CONFIG
    if state is State.NOT_STARTED and config.exists():
        yield f"to start it: orchestrate train --config {quoted(config.absolute())}"
    if state is State.KILLED and latest is None:
        yield "there is no checkpoint: the run has to start again"
    elif state in (State.KILLED, State.FAILED) and latest is not None:
        yield f"--resume starts from step {latest.step:,} and repeats {max(0, metrics.step - latest.step):,} steps"
    if state is State.SILENT:
        yield "the run was stopped or killed, or its files are not copied any more"
    if state is State.RUNNING and age is not None and age > _longest_silence(metrics):
        yield f"no line for {duration(age)}: the run waits for data, evaluates, saves, or hangs"
    last = metrics.recent[-1] if metrics.recent else None
    if last is not None and number(last, "loss") is None:
        yield f"the loss of step {last['step']:,} is not finite"
    elif last is not None and number(last, "grad_norm") is None:
        yield f"the gradient norm of step {last['step']:,} is not finite; the step changed no weight"
    if metrics.damaged:
        yield f"{counted(metrics.damaged, 'line')} of {METRICS} could not be read and were left out"


def as_json(status: Status) -> dict[str, Any]:
    """Return a status as one JSON object; times are in seconds, shares are fractions."""
    train, evaluation = status.train, status.metrics.evaluation
    figures = {
        "experiment": status.name,
        "directory": str(status.directory.absolute()),
        "state": status.state.value,
        "detail": status.detail,
        "trainer": {"held": status.lock.held.value, "pid": status.lock.pid, "host": status.lock.host},
        "step": status.step,
        "total_steps": status.total_steps,
        "progress": status.progress,
        "stage": status.stage,
        "stages": len(status.stages) or None,
        "eta_seconds": status.eta,
        "line_age_seconds": status.line_age,
        "train": train,
        "tokens_per_second": status.median("tokens_per_second"),
        "positions_per_second": status.median("positions_per_second"),
        "seconds_per_step": status.seconds_per_step,
        "shares": status.shares,
        "ranks": ranks.as_json(status.ranks),
        "evaluation": evaluation,
        "best_evaluation": status.metrics.best,
        "checkpoint": _checkpoint_json(status.latest, status.now),
        "best_checkpoint": _checkpoint_json(status.best, status.now),
        "utilization": status.utilization,
        "data": status.metrics.data,
        "sample": status.sample,
        "advice": list(status.metrics.advice.values()),
        "warnings": status.warnings,
        "lines": status.metrics.lines,
        "damaged_lines": status.metrics.damaged,
    }
    return {name: _without_infinities(value) for name, value in figures.items()}


def _without_infinities(value: Any) -> Any:
    """Return a value of JSON with None for the numbers that JSON has no form for, which sums may come to."""
    if isinstance(value, dict):
        return {name: _without_infinities(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_infinities(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checkpoint_json(checkpoint: Checkpoint | None, now: float) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    age = max(0.0, now - checkpoint.saved_at)
    return {"path": str(checkpoint.path.absolute()), "step": checkpoint.step, "age_seconds": age}


def _stages(config: dict[str, Any]) -> list[Stage]:
    """Return the stages of a resolved config; none where it has none, or others than the trainer writes."""
    stages: list[Stage] = []
    try:
        for stage in config.get("stages") or []:
            end = stage["steps"] + (stages[-1].end if stages else 0)
            stages.append(Stage(end, stage["sequence_length"] * stage["sequences_per_step"]))
    except (TypeError, KeyError):
        return []
    return stages if all(type(number) is int and number > 0 for stage in stages for number in stage) else []


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _mean(metrics: Metrics, key: str) -> float | None:
    """Return the mean of the numbers under a key in the newest train rows."""
    values = _present(number(row, key) for row in metrics.recent)
    with contextlib.suppress(OverflowError):  # of numbers that no run has
        return statistics.fmean(values) if values else None
    return None


def _between_steps(metrics: Metrics, key: str) -> float | None:
    """Return the average seconds per step of work between steps, whether each step has a line or not."""
    rows = list(metrics.recent)
    values = _present(number(row, key) for row in rows[1:])
    steps = rows[-1]["step"] - rows[0]["step"] if rows else 0
    return sum(values) / steps if values and steps > 0 else None


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
