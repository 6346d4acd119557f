"""The options of `orchestrate tune`, each field of the request declared together with its option."""

# `option` returns a field, which ruff cannot see.
# ruff: noqa: RUF009

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from typer import Argument

from orchestrator.options import option

ABOUT = """Search hyperparameters with Optuna; train the best ones beside the base.

The same command continues a search that was stopped."""

RUN_HELP = "The run to vary: its name, its directory, a checkpoint of it, or a config. Default: the newest run."


class Sampler(str, enum.Enum):
    """How values are drawn."""

    TPE = "tpe"
    RANDOM = "random"


class Pruner(str, enum.Enum):
    """Which trials end early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@dataclass(frozen=True)
class Request:
    """A search as the command line asks for it."""

    space: Path = field(
        metadata={"option": Argument(metavar="SPACE.yaml", help="The config keys to search, with their values.")}
    )
    run: str | None = field(default=None, metadata={"option": Argument(metavar="RUN", help=RUN_HELP)})
    experiment: str | None = option(None, "The run to vary, by its experiment.", metavar="NAME")
    config: Path | None = option(None, "The run to vary, by its config.", metavar="FILE")
    study: str | None = option(None, "The study's folder among the runs. Default: EXPERIMENT-tune.", metavar="NAME")
    trials: int = option(None, "Trials in all, the pruned ones included.", metavar="N", min=1, max=100_000, default=24)
    jobs: int = option(None, "Trials at a time, which share the CPU's cores.", metavar="N", min=1, max=256, default=1)
    tokens: str | None = option(None, "Tokens of a trial, such as 20M. Default: the config's own run.", metavar="COUNT")
    evaluations: int = option(None, "Evaluations of a trial.", metavar="N", min=1, max=1000, default=8)
    sampler: Sampler = option(None, "How values are drawn.", default=Sampler.TPE)
    pruner: Pruner = option(None, "Which trials end early.", default=Pruner.MEDIAN)
    seed: int = option(None, "Seed of the sampler.", metavar="N", min=0, max=2**32 - 1, default=0)
    seeds: int = option(
        None, "Seeds with which base and winner are trained afterwards.", metavar="N", min=0, max=100, default=3
    )
    final_tokens: str | None = option(None, "Tokens of these runs. Default: the config's own run.", metavar="COUNT")
