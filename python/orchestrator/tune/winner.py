"""After the search: the best config as YAML, plots, and the winner trained beside the base with several seeds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from orchestrator import _native, launch
from orchestrator.command_error import CommandError
from orchestrator.launch import Job
from orchestrator.paths import shown
from orchestrator.run_files import TRAINING_CONFIG
from orchestrator.screen import counted, heading, plain, step
from orchestrator.settings import Launch
from orchestrator.training_record import read_rows
from orchestrator.tune.search import OVERRIDES, Plan, shown_value

BEST, REPORT = "best.yaml", "report.html"


@dataclass(frozen=True)
class Comparison:
    """Final held-out losses of one config, one per seed."""

    name: str
    losses: list[float]

    @property
    def text(self) -> str:
        """The losses, their mean and their standard deviation."""
        each = ", ".join(f"{loss:.4f}" for loss in self.losses)
        deviation = f", standard deviation {stdev(self.losses):.4f}" if len(self.losses) > 1 else ""
        return f"loss {mean(self.losses):.4f}{deviation} over {counted(len(self.losses), 'seed')}: {each}"


def best_trial(study: optuna.Study, folder: Path) -> FrozenTrial:
    """Return the complete trial with the lowest loss."""
    if not study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
        raise CommandError(f"no trial of {folder} was trained to its end: its trials are all pruned or refused")
    return study.best_trial


def write_best(plan: Plan, trial: FrozenTrial) -> Path:
    """Write the config of the best trial as a run of the base's length, and return its path."""
    path = plan.folder / BEST
    values = plan.base.trial_values(trial.user_attrs[OVERRIDES], plan.base.full_tokens)
    path.write_text(_native.config_to_yaml(values), encoding="utf-8")
    return path


def write_report(study: optuna.Study, folder: Path) -> Path:
    """Write a page with the study's history, importances and parallel coordinates, and return its path.

    Importances are PED-ANOVA's (Watanabe et al. 2023), which needs two complete trials and two parameters that vary.
    """
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import plot_optimization_history, plot_parallel_coordinate, plot_param_importances

    plots = [plot_optimization_history(study), plot_parallel_coordinate(study)]
    if len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few trials, whose importances are rough
            plots.insert(1, plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
    parts = [plot.to_html(full_html=False, include_plotlyjs=number == 0) for number, plot in enumerate(plots)]
    name = escape(study.study_name)
    page = f"<!doctype html><meta charset='utf-8'><title>{name}</title><h1>{name}</h1>\n" + "\n".join(parts) + "\n"
    path = folder / REPORT
    path.write_text(page, encoding="utf-8")
    return path


def retrain(plan: Plan, trial: FrozenTrial, seeds: int, target: Path | None) -> list[Comparison]:
    """Train the base and the winner with several seeds, as ordinary runs; resume those begun."""
    configs = {"base": {}, "winner": trial.user_attrs[OVERRIDES]}
    comparisons = []
    for name, overrides in configs.items():
        losses = []
        for seed in range(1, seeds + 1):
            values = plan.base.trial_values({**overrides, "runtime.seed": seed}, plan.final_tokens)
            losses.append(_train(plan, plan.folder / f"{name}-seed-{seed}", values, target))
        comparisons.append(Comparison(name, losses))
    return comparisons


def _train(plan: Plan, folder: Path, values: dict[str, Any], target: Path | None) -> float:
    """Train a run unless it has ended, and return its last held-out loss."""
    has_checkpoint = (folder / "checkpoints" / "latest").exists()
    total = values["scheduler"]["total_steps"]
    if (config := folder / TRAINING_CONFIG).exists():
        steps = _native.RunConfig.load_for_planning(config).to_dict()["scheduler"]["total_steps"]
        if steps != total:
            raise CommandError(
                f"the run {shown(folder)} was begun with {steps:,} steps, not {total:,}: remove it, or give the "
                "--final-tokens of before"
            )
    last = _last_evaluation(folder)
    if last is None or last["step"] < total:
        step("training", f"{folder.name} in {folder}")
        job = Job(plan.base.write(folder, values), resume="latest" if has_checkpoint else None)
        code = launch.start(job.words(), Launch.AUTO, target)
        if code != 0:
            raise CommandError(
                f"the run {folder.name} ended with exit code {code}: the same command continues it", code
            )
        last = _last_evaluation(folder)
    if last is None:
        raise CommandError(f"{folder} has no evaluation: set runtime.evaluation.every_n_steps")
    return float(last["loss"])


def _last_evaluation(folder: Path) -> dict[str, Any] | None:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "evaluation"]
    return rows[-1] if rows else None


def show(plan: Plan, study: optuna.Study, trial: FrozenTrial, comparisons: list[Comparison]) -> None:
    """Print the result of a study."""
    states = [entry.state.name for entry in study.get_trials(deepcopy=False)]
    heading("What the search found")
    plain(f"{counted(states.count('COMPLETE'), 'trial')} complete, {states.count('PRUNED')} pruned or not trained")
    plain(f"best: trial {trial.number}, loss {trial.value:.4f} after {plan.base.tokens:,} tokens")
    for key, value in trial.user_attrs[OVERRIDES].items():
        plain(f"  {key}: {shown_value(value)}")
    if comparisons:
        heading(f"Trained on {plan.final_tokens:,} tokens")
        width = max(len(comparison.name) for comparison in comparisons)
        for comparison in comparisons:
            plain(f"{comparison.name:<{width}}  {comparison.text}")
        plain(_verdict(*comparisons))


def _verdict(base: Comparison, winner: Comparison) -> str:
    gain = mean(base.losses) - mean(winner.losses)
    of = ""
    if len(base.losses) > 1 and (deviation := max(stdev(base.losses), stdev(winner.losses))):
        of = f", {abs(gain) / deviation:.1f} standard deviations"
    return f"the winner's loss is {abs(gain):.4f} {'lower' if gain > 0 else 'higher'}{of}"
