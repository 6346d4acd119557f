"""The commands that read what runs have written, and `doctor`, which looks at the machine they run on."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from orchestrator import terminal
from orchestrator.arguments import Command
from orchestrator.command_error import CommandError
from orchestrator.options import ConfigFlag, add_trainer_command, takes, trainer_command

app = typer.Typer()

DEVICE = ConfigFlag("device", "runtime.device", panel=None)


@app.command("runs", cls=Command)
def list_runs(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run.")] = False,
) -> None:
    """List the runs, the newest first: state, step, loss, size, age."""
    from orchestrator.watch.overview import run

    run(is_json)


@app.command("watch", cls=Command)
def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run: its name, its directory, a checkpoint of it, or its config. Default: the newest run.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the run's status once, as plain text.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks at the files.")
    ] = 1.0,
) -> None:
    """Show a run live, also one of another terminal or machine, from its files."""
    from orchestrator.watch.live import run as show

    show(run, once, is_json, interval)


add_trainer_command(app, "validate-data")


@app.command("doctor", cls=Command)
@takes(
    [DEVICE.parameter().replace(default="auto"), *trainer_command("plan").parameters(["json"])],
    "Tell whether this machine can train: GPU, driver, libraries, programs, disk, Hub.",
)
def examine(device: str, **options: Any) -> None:
    """Print what `doctor` finds."""
    from orchestrator import doctor
    from orchestrator.paths import Roots
    from orchestrator.screen import finding

    findings = doctor.examine(device, Roots.from_environment())
    if options["json"]:
        terminal.result(json.dumps(doctor.as_json(findings)))
    else:
        for entry in findings:
            finding(entry.topic, entry.text, entry.verdict.value)
    problems = [entry.text for entry in findings if entry.verdict is doctor.Verdict.BAD]
    if problems:
        raise CommandError("\n".join(["this machine cannot train on what is asked:", *problems]))
