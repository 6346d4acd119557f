"""`orchestrate tune`: starts or continues a study, searches it, and trains its winner."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import _native, extras, gpus, signals
from orchestrator.command_error import CommandError
from orchestrator.paths import Roots, shown
from orchestrator.run_files import TRAINING_CONFIG
from orchestrator.screen import counted, heading, plain, step
from orchestrator.tune.options import Request
from orchestrator.watch.run_directory import METRICS

if TYPE_CHECKING:
    from orchestrator.tune.search import Plan

NEEDED = ("optuna", "plotly")


def run(request: Request) -> None:
    """Search, write the best config and the report, train base and winner, and print the result."""
    if missing_packages := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise CommandError(f"searches need {' and '.join(missing_packages)}: {extras.install_command('tune')}")
    from orchestrator.tune import search, winner

    roots = Roots.from_environment()
    plan = _plan(request, roots)
    with _native.RunLock(plan.folder.absolute()) as lock, signals.on_forced_exit(lock.release):
        study = search.open_study(plan)
        step("study", shown(plan.folder))
        step("space", ", ".join(plan.space.parameters))
        step("trials", _length(plan))
        search.Search(plan, study).run()
        with search.study_errors(plan.folder):
            trial = winner.best_trial(study, plan.folder)
            paths = [winner.write_best(plan, trial), winner.write_report(study, plan.folder)]
        comparisons = winner.retrain(plan, trial, request.seeds, roots.target) if request.seeds else []
        with search.study_errors(plan.folder):
            winner.show(plan, study, trial, comparisons)
        heading("Where it is")
        for path in paths:
            plain(shown(path))
        plain(f"optuna-dashboard sqlite:///{shown(plan.folder / search.DATABASE)}")


def _plan(request: Request, roots: Roots) -> Plan:
    from orchestrator.tune import space
    from orchestrator.tune.search import Plan
    from orchestrator.tune.trial_config import check_bounds, open_base

    search_space = space.read(request.space)
    config = _config(request, roots)
    if not config.is_file():
        raise CommandError(
            f"there is no {shown(config)}: prepare the run with `orchestrate --launch none --experiment NAME`"
        )
    tokens, final_tokens = _count("--tokens", request.tokens), _count("--final-tokens", request.final_tokens)
    threads = max(1, (os.cpu_count() or 1) // request.jobs) if request.jobs > 1 else None
    base = open_base(config, tokens, threads)
    if request.jobs > 1 and _is_on_gpu(base.values["runtime"]["device"]):
        raise CommandError("--jobs is for CPUs: trials on a GPU run one at a time; add --device cpu or leave it out")
    check_bounds(base, search_space)
    gpus.require(base.values["runtime"]["device"], None)
    folder = _study_folder(request.study, config.absolute().parent, roots)
    return Plan(request, folder, base, search_space, final_tokens or base.full_tokens)


def _study_folder(study: str | None, base: Path, roots: Roots) -> Path:
    """Return the folder of the study, which must not be a run's: trials are written into it."""
    from orchestrator.tune.search import DATABASE

    name = study or f"{base.name}-tune"
    folder = roots.location(name, None, "--study").folder.absolute()
    is_base = folder.exists() and folder.samefile(base)
    is_run = any((folder / file).exists() for file in (TRAINING_CONFIG, METRICS)) and not (folder / DATABASE).exists()
    if is_base or is_run:
        whose = "the run that is varied" if is_base else "another run"
        raise CommandError(f"--study {name}: {shown(folder)} is the directory of {whose}: give the search another name")
    return folder


def _count(flag: str, value: str | None) -> int | None:
    from orchestrator.tune.space import count

    try:
        return count(value)
    except ValueError as problem:
        raise CommandError(f"{flag} {problem}") from None


def _config(request: Request, roots: Roots) -> Path:
    if sum(name is not None for name in (request.run, request.experiment, request.config)) > 1:
        raise CommandError("say one run to vary: RUN, --experiment NAME or --config FILE")
    if request.config is not None:
        return request.config
    if request.experiment is not None:
        return roots.location(request.experiment, None).folder / TRAINING_CONFIG
    return _native.config_of_run(request.run)


def _is_on_gpu(device: str) -> bool:
    if device != "auto":
        return device != "cpu"
    try:
        return any(gpu.refusal is None for gpu in _native.gpus())
    except _native.ConfigError:
        return False


def _length(plan: Plan) -> str:
    trials, jobs = plan.request.trials, plan.request.jobs
    one = f"{trials} of {plan.base.tokens:,} tokens, evaluated {counted(plan.request.evaluations, 'time')}"
    return one if jobs == 1 else f"{one}; {jobs} at a time with {counted(plan.base.threads or 1, 'thread')} each"
