"""The commands that train, or that prepare and measure training."""

from __future__ import annotations

import enum
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import _native, finetuning, terminal
from orchestrator.arguments import Command
from orchestrator.command_error import CommandError
from orchestrator.options import add_trainer_command, parameter, run_in_the_trainer, takes, trainer_command
from orchestrator.settings import Depth, Launch, LaunchMode, PlannedPreset, Ranks

app = typer.Typer()

TRAIN, PLAN = trainer_command("train"), trainer_command("plan")
VocabSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens in the vocabulary. Default: by the depth.")
]
PresetName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A shipped config. Without it and --depth they are listed.")
]


@app.command("finetune", cls=Command)
@takes(finetuning.parameters(), finetuning.ABOUT)
def finetune(**flags: Any) -> None:
    """Train a pretrained model on conversations."""
    from orchestrator.pipeline import run

    raise typer.Exit(run(finetuning.settings_of(**flags)))


@app.command("train", cls=Command)
@takes(
    [*TRAIN.parameters(), parameter("launch", LaunchMode, Launch.AUTO), parameter("nproc", Ranks, None)], TRAIN.about
)
def train(launch: Launch, nproc: int | None, **typed: Any) -> None:
    """Run the trainer's `train`, in its program, in this process or in several processes."""
    from orchestrator.launch import check_ranks, start, start_ranks
    from orchestrator.paths import Roots

    if launch is Launch.NONE:
        raise CommandError("--launch none has nothing to do here: `train` trains")
    if nproc is not None:
        check_ranks(launch)
        raise typer.Exit(start_ranks(TRAIN.words(_with_config(typed)), nproc))
    raise typer.Exit(start(TRAIN.words(typed), launch, Roots.from_environment().target))


def _with_config(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the config of the newest run where none is named, so that all ranks take the same."""
    named = typed["run"] or typed["config"] or typed["resume"] not in (None, "latest")
    return typed if named else {**typed, "config": _native.config_of_run()}


@app.command("plan", cls=Command)
@takes([*PLAN.parameters(), parameter("preset", PlannedPreset), parameter("depth", Depth)], PLAN.about)
def plan(preset: str | None, depth: int | None, **typed: Any) -> None:
    """Run the trainer's `plan`, also of a shipped config or of a depth."""
    from orchestrator.base_config import config_file, preset_text
    from orchestrator.depth import preset as preset_of_depth

    if sum(said is not None for said in (typed["run"], typed["config"], preset, depth)) > 1:
        raise CommandError("say one thing to plan: RUN, --config FILE, --preset NAME or --depth N")
    with tempfile.TemporaryDirectory() as folder:
        name = preset or f"depth-{depth}"
        if preset is not None:
            typed["config"] = config_file(name, preset_text(preset), Path(folder))
        elif depth is not None:
            typed["config"] = config_file(name, preset_of_depth(depth), Path(folder))
        try:
            code = run_in_the_trainer(PLAN.words(typed))
        except _native.TrainerError as error:
            # The message names the temporary file, which no longer exists when it is read.
            message = str(error).replace(str(Path(folder, f"{name}.yaml")), name)
            if typed["run"] in _native.presets() and not typed["config"]:
                message += f"; the shipped config of that name is --preset {typed['run']}"
            raise CommandError(message, error.exit_code) from error
        raise typer.Exit(code)


@app.command("preset", cls=Command)
@takes(
    [
        parameter("name", PresetName),
        parameter("depth", Depth),
        *PLAN.parameters(["gpu", "memory"]),
        parameter("vocab_size", VocabSize),
    ],
    "Write a config to standard output: a shipped one, or that of `--depth N` with the reason for each value and what "
    "the plan says of it.",
)
def preset(name: str | None, depth: int | None, vocab_size: int | None, **plan_options: Any) -> None:
    """Print a shipped config, the config of a depth, or the names of the shipped ones."""
    from orchestrator.base_config import preset_of_depth, preset_text

    flags = {"--vocab-size": vocab_size, "--gpu": plan_options["gpu"], "--memory": plan_options["memory"]}
    given = [flag for flag, value in flags.items() if value is not None]
    if depth is None and given:
        raise CommandError(f"{', '.join(given)} is for --depth N: a shipped config is printed as it is")
    if name is not None and depth is not None:
        raise CommandError(f"{name} and --depth {depth} are two configs: give one of them")
    if depth is not None:
        terminal.result(preset_of_depth(depth, vocab_size, plan_options).rstrip("\n"))
    elif name is not None:
        terminal.result(preset_text(name, "").rstrip("\n"))
    else:
        terminal.result("\n".join(_native.presets()))


class Sampler(str, enum.Enum):
    """How `tune` draws values."""

    TPE = "tpe"
    RANDOM = "random"


class Pruner(str, enum.Enum):
    """Which trials `tune` ends early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@app.command("tune", cls=Command)
def tune(
    space: Annotated[Path, typer.Argument(metavar="SPACE.yaml", help="The config keys to search, with their values.")],
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run to vary: its name, its directory, a checkpoint of it, or a config. Default: the newest run.",
        ),
    ] = None,
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="The run to vary, by its experiment.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The run to vary, by its config.")] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="The study's folder among the runs. Default: EXPERIMENT-tune.")
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Trials in all, the pruned ones included.")
    ] = 24,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Trials at a time, which share the CPU's cores.")
    ] = 1,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens of a trial, such as 20M. Default: the config's own run.")
    ] = None,
    evaluations: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Evaluations of a trial.")] = 8,
    sampler: Annotated[Sampler, typer.Option(help="How values are drawn.")] = Sampler.TPE,
    pruner: Annotated[Pruner, typer.Option(help="Which trials end early.")] = Pruner.MEDIAN,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the sampler.")] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=0, max=100, help="Seeds with which base and winner are trained afterwards.")
    ] = 3,
    final_tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens of these runs. Default: the config's own run.")
    ] = None,
) -> None:
    """Search hyperparameters with Optuna; train the best ones beside the base.

    The same command continues a search that was stopped.
    """
    from orchestrator.tune.command import Request
    from orchestrator.tune.command import run as search

    search(Request(
        space, experiment, config, study, trials, jobs, tokens, evaluations, sampler.value, pruner.value, seed, seeds,
        final_tokens, run,
    ))  # fmt: skip


add_trainer_command(app, "bench")
