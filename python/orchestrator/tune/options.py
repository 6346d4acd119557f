"""The options of `orchestrate tune`, each field of the request declared together with its option."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ABOUT = """Search hyperparameters with Optuna; train the best ones beside the base.

The same command continues a search that was stopped."""


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

    space: Annotated[Path, Argument(metavar="SPACE.yaml", help="The config keys to search, with their values.")]
    run: Annotated[
        str | None,
        Argument(
            metavar="RUN",
            help="The run to vary: its name, its directory, a checkpoint of it, or a config. Default: the newest run.",
        ),
    ] = None
    experiment: Annotated[str | None, Option(metavar="NAME", help="The run to vary, by its experiment.")] = None
    config: Annotated[Path | None, Option(metavar="FILE", help="The run to vary, by its config.")] = None
    study: Annotated[
        str | None, Option(metavar="NAME", help="The study's folder among the runs. Default: EXPERIMENT-tune.")
    ] = None
    trials: Annotated[
        int,
        Option(metavar="N", min=1, max=100_000, help="Trials in all, the pruned ones included."),
    ] = 24
    jobs: Annotated[int, Option(metavar="N", min=1, max=256, help="Trials at a time, which share the CPU's cores.")] = 1
    tokens: Annotated[
        str | None, Option(metavar="COUNT", help="Tokens of a trial, such as 20M. Default: the config's own run.")
    ] = None
    evaluations: Annotated[int, Option(metavar="N", min=1, max=1000, help="Evaluations of a trial.")] = 8
    sampler: Annotated[Sampler, Option(help="How values are drawn.")] = Sampler.TPE
    pruner: Annotated[Pruner, Option(help="Which trials end early.")] = Pruner.MEDIAN
    seed: Annotated[int, Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the sampler.")] = 0
    seeds: Annotated[
        int, Option(metavar="N", min=0, max=100, help="Seeds with which base and winner are trained afterwards.")
    ] = 3
    final_tokens: Annotated[
        str | None, Option(metavar="COUNT", help="Tokens of these runs. Default: the config's own run.")
    ] = None
