"""The commands that train, or that prepare and measure training."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import _native, finetuning, terminal
from orchestrator.arguments import Command
from orchestrator.command_error import CommandError
from orchestrator.options import (
    add_trainer_command,
    options_of,
    parameter,
    run_in_the_trainer,
    takes,
    trainer_command,
)
from orchestrator.settings import Depth, Launch, LaunchMode, PlannedPreset, Ranks
from orchestrator.tune import options as search_options

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
def train(launch: Launch, nproc: int | None, **options: Any) -> None:
    """Run the trainer's `train`, in its program, in this process or in several processes."""
    from orchestrator.launch import check_ranks, start, start_ranks
    from orchestrator.paths import Roots

    if launch is Launch.NONE:
        raise CommandError("--launch none has nothing to do here: `train` trains")
    if nproc is not None:
        check_ranks(launch)
        raise typer.Exit(start_ranks(TRAIN.words(_with_config(options)), nproc))
    raise typer.Exit(start(TRAIN.words(options), launch, Roots.from_environment().target))


def _with_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the config of the newest run where none is named, so that all ranks take the same."""
    names_run = options["run"] or options["config"] or options["resume"] not in (None, "latest")
    return options if names_run else {**options, "config": _native.config_of_run()}


@app.command("plan", cls=Command)
@takes([*PLAN.parameters(), parameter("preset", PlannedPreset), parameter("depth", Depth)], PLAN.about)
def plan(preset: str | None, depth: int | None, **options: Any) -> None:
    """Run the trainer's `plan`, also of a shipped config or of a depth."""
    from orchestrator.base_config import config_file, preset_text
    from orchestrator.depth import preset as preset_of_depth

    if sum(value is not None for value in (options["run"], options["config"], preset, depth)) > 1:
        raise CommandError("say one thing to plan: RUN, --config FILE, --preset NAME or --depth N")
    with tempfile.TemporaryDirectory() as folder:
        name = preset or f"depth-{depth}"
        if preset is not None:
            options["config"] = config_file(name, preset_text(preset), Path(folder))
        elif depth is not None:
            options["config"] = config_file(name, preset_of_depth(depth), Path(folder))
        try:
            code = run_in_the_trainer(PLAN.words(options))
        except _native.TrainerError as error:
            # The message names the temporary file, which no longer exists when it is read.
            message = str(error).replace(str(Path(folder, f"{name}.yaml")), name)
            if options["run"] in _native.presets() and not options["config"]:
                message += f"; the shipped config of that name is --preset {options['run']}"
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
    flags_of_depth = [flag for flag, value in flags.items() if value is not None]
    if depth is None and flags_of_depth:
        raise CommandError(f"{', '.join(flags_of_depth)} is for --depth N: a shipped config is printed as it is")
    if name is not None and depth is not None:
        raise CommandError(f"{name} and --depth {depth} are two configs: give one of them")
    if depth is not None:
        terminal.result(preset_of_depth(depth, vocab_size, plan_options).rstrip("\n"))
    elif name is not None:
        terminal.result(preset_text(name, "").rstrip("\n"))
    else:
        terminal.result("\n".join(_native.presets()))


@app.command("tune", cls=Command)
@takes(options_of(search_options.Request), search_options.ABOUT)
def tune(**options: Any) -> None:
    """Search the hyperparameters of a run."""
    from orchestrator.tune.command import run

    run(search_options.Request(**options))


add_trainer_command(app, "bench")
