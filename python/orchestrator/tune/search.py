"""The search: trials are drawn from the space, trained each in a process of its own, and pruned as they evaluate."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from orchestrator import _native
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.screen import note, step
from orchestrator.tune.options import Pruner, Request, Sampler
from orchestrator.tune.space import Space
from orchestrator.tune.trial_config import Base, overrides_of, without_origin, written

DATABASE = "study.db"
LOG = "stderr.txt"
"""The file in a trial's folder with the stderr of its process."""
LOCK_TIMEOUT = 20
"""Seconds to wait for another program's lock on the database."""
MOST_SEEDS = 2**32
"""A sampler takes a smaller seed."""
REFUSED_IN_A_ROW = 10
"""Trials in a row that cannot be trained, after which the search ends."""
OVERRIDES, REFUSED = "overrides", "refused"
"""Attributes of a trial: all keys that it sets, and why it was not trained or ended early by an error."""
IDENTITY = {"space": "space", "base": "base", "tokens": "number of tokens"}
"""The values that identify a study, by their keys, as messages name them."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Plan:
    """The settings of a study."""

    request: Request
    folder: Path
    base: Base
    space: Space
    final_tokens: int
    """Tokens that each run of base and winner is trained on afterwards."""


@dataclass
class Search:
    """A study in progress. Optuna's study is used by one thread at a time."""

    plan: Plan
    study: optuna.Study
    lock: threading.Lock = field(default_factory=threading.Lock)
    processes: set[subprocess.Popen[str]] = field(default_factory=set)
    is_stopped: bool = False

    def run(self) -> None:
        """Train until the planned number of trials has ended."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self.plan.request.jobs) as pool:
            try:
                while True:
                    while len(running) < self.plan.request.jobs and self._left() > len(running):
                        running.add(pool.submit(self._one_trial))
                    if not running:
                        return
                    finished_futures, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished_futures:
                        future.result()
                    self._check_refusals()
            finally:
                self._stop()

    def _left(self) -> int:
        with self.lock, study_errors(self.plan.folder):
            return self.plan.request.trials - len(self.study.get_trials(deepcopy=False, states=ENDED))

    def _one_trial(self) -> None:
        with self.lock, study_errors(self.plan.folder):
            trial = self.study.ask(self.plan.space.distributions())
        state, value = self._outcome(trial)
        if self.is_stopped:
            return  # stays open: the next search repeats it
        with self.lock, study_errors(self.plan.folder):
            finished_trial = self.study.tell(trial, value, state)
            best = min((t.value for t in self.study.get_trials(deepcopy=False) if t.value is not None), default=None)
        _show(finished_trial, best)

    def _outcome(self, trial: Trial) -> tuple[TrialState, float | None]:
        """Train a trial and return how it ended, and the loss of a complete one.

        The trial's process makes the memory plan, so that this one holds no memory of a GPU.
        """
        plan = self.plan
        folder = plan.folder / "trials" / f"{trial.number:04}"
        try:
            overrides = overrides_of(plan.base, plan.space, trial.params)
            threads = {"runtime.threads": plan.base.threads} if plan.base.threads else {}
            values = plan.base.trial_values(overrides | threads, plan.base.tokens)
            with self.lock, study_errors(plan.folder):
                trial.set_user_attr(OVERRIDES, overrides)
        except _native.TrainerError as error:
            return self._refused(trial, without_origin(str(error)))
        return self._trained(trial, plan.base.write(folder, values))

    def _trained(self, trial: Trial, config: Path) -> tuple[TrialState, float | None]:
        tokens = self.plan.base.tokens / self.plan.request.evaluations
        loss, error = None, None
        with self._process(config) as process:
            assert process.stdout
            for line in process.stdout:
                report = json.loads(line)
                error = report.get("error")
                if error is None:
                    loss = report["loss"]
                    with self.lock, study_errors(self.plan.folder):
                        trial.report(loss, round(report["evaluation"] * tokens))
                        if trial.should_prune():
                            return TrialState.PRUNED, None
            process.wait()
        if error is not None or process.returncode != 0 or loss is None:
            log = shown(config.with_name(LOG))
            return self._refused(trial, error or f"its process ended with exit code {process.returncode}: see {log}")
        return TrialState.COMPLETE, loss

    def _refused(self, trial: Trial, reason: str) -> tuple[TrialState, None]:
        if not self.is_stopped:
            with self.lock, study_errors(self.plan.folder):
                trial.set_user_attr(REFUSED, reason)
        return TrialState.PRUNED, None

    @contextmanager
    def _process(self, config: Path) -> Iterator[subprocess.Popen[str]]:
        """Run the trial's process, which has ended when the block is left."""
        command = [
            sys.executable,
            "-m",
            "orchestrator.tune.trial_process",
            str(config),
            str(self.plan.request.evaluations),
        ]
        with config.with_name(LOG).open("w") as errors:
            # A session of its own: the terminal's Ctrl-C reaches this process only, which ends its trials.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self.processes.add(process)
        if self.is_stopped:
            process.kill()
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            self.processes.discard(process)

    def _check_refusals(self) -> None:
        """End a search whose trials cannot be trained."""
        with self.lock, study_errors(self.plan.folder):
            finished_trials = self.study.get_trials(deepcopy=False, states=ENDED)
        last = [trial.user_attrs.get(REFUSED) for trial in finished_trials[-REFUSED_IN_A_ROW:]]
        if len(last) == REFUSED_IN_A_ROW and all(last):
            raise CommandError(
                f"the last {REFUSED_IN_A_ROW} trials could not be trained, the last one because: {last[-1]}. "
                "Narrow the search space, or train a smaller base"
            )

    def _stop(self) -> None:
        self.is_stopped = True
        for process in list(self.processes):
            process.kill()


def open_study(plan: Plan) -> optuna.Study:
    """Return the plan's study, new or as an earlier search left it.

    Trials that were running when an earlier search was killed are marked as failed and queued again with the same
    values. Call it with the study folder's lock held: no other search runs then.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    identity = {"space": plan.space.as_dict(), "base": plan.base.text, "tokens": plan.base.tokens}
    with study_errors(plan.folder):
        study = optuna.create_study(
            storage=storage(plan.folder), study_name=plan.folder.name, direction="minimize", load_if_exists=True,
            sampler=_sampler(plan, plan.request.seed), pruner=_pruner(plan),
        )  # fmt: skip
        stored = study.user_attrs.get("identity")
        if stored is None:
            study.set_user_attr("identity", identity)
            if point := plan.space.point(plan.base.values):
                study.enqueue_trial(point)
        elif changed_parts := [IDENTITY[name] for name, value in identity.items() if stored.get(name) != value]:
            raise CommandError(
                f"the study {shown(plan.folder)} was begun with another {' and '.join(changed_parts)}: "
                "put it back, or give the search a --study of its own"
            )
        else:
            # With the seed of the first session the sampler would draw the values of the first trials again.
            study.sampler = _sampler(plan, (plan.request.seed + len(study.get_trials(deepcopy=False))) % MOST_SEEDS)
        _repeat_interrupted(study)
    return study


def _repeat_interrupted(study: optuna.Study) -> None:
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs={"repeats": trial.number})
        note(f"Trial {trial.number} was interrupted: its values are tried again.")


def storage(folder: Path) -> optuna.storages.BaseStorage:
    """Return the database of a study, an SQLite file."""
    url = f"sqlite:///{folder / DATABASE}"
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT}})


@contextmanager
def study_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the database in the block into a `CommandError`."""
    try:
        yield
    except (CommandError, OSError):
        raise
    except Exception as error:  # Optuna and SQLAlchemy raise any class for values that were altered
        cause = "".join(str(error.__cause__ or error).splitlines()[:1])
        if not isinstance(error, (SQLAlchemyError, optuna.exceptions.StorageInternalError, RuntimeError)):
            cause = f"it holds a value that does not belong there ({type(error).__name__}: {cause})"
        raise CommandError(
            f"the study's database {shown(folder / DATABASE)} cannot be used: {cause}. Close the program that holds "
            "it, or remove the folder to start again"
        ) from error


def _sampler(plan: Plan, seed: int) -> optuna.samplers.BaseSampler:
    if plan.request.sampler is Sampler.RANDOM:
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=plan.request.jobs > 1)


def _pruner(plan: Plan) -> optuna.pruners.BasePruner:
    between = round(plan.base.tokens / plan.request.evaluations)
    if plan.request.pruner is Pruner.MEDIAN:
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=between)
    if plan.request.pruner is Pruner.HYPERBAND:
        return optuna.pruners.HyperbandPruner(between, plan.base.tokens)
    return optuna.pruners.NopPruner()


def _show(trial: FrozenTrial, best: float | None) -> None:
    values = ", ".join(f"{key.rpartition('.')[2]} {shown_value(value)}" for key, value in trial.params.items())
    if trial.state is TrialState.COMPLETE:
        assert trial.value is not None
        result = f"loss {trial.value:.4f}" + (" (best)" if trial.value == best else "")
    elif REFUSED in trial.user_attrs:
        result = f"not trained: {trial.user_attrs[REFUSED].splitlines()[0]}"
    else:
        at, loss = max(trial.intermediate_values.items())
        result = f"pruned at loss {loss:.4f} after {at:,} tokens"
    step(f"trial {trial.number}", f"{result}  {values}")


def shown_value(value: Any) -> str:
    """Return a value as people read it, and write it in YAML."""
    return f"{value:.3g}" if isinstance(value, float) else written(value)
