"""The commands that read what runs have written, and `doctor`, which looks at the machine they run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator import terminal
from orchestrator.arguments import Command
from orchestrator.command_error import CommandError
from orchestrator.options import ConfigFlag, add_trainer_command, parameter, takes, trainer_command

if TYPE_CHECKING:
    from orchestrator.doctor import Finding

app = typer.Typer()

DEVICE = ConfigFlag("device", "runtime.device", panel=None)
Crash = Annotated[
    Path | None,
    typer.Option("--crash", metavar="DIR", help="Kill and resume a small run in this folder, and tell what it keeps."),
]
Kills = Annotated[
    int | None,
    typer.Option("--kills", metavar="N", min=1, max=1_000_000, help="With --crash: how often (100 times)."),
]


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
    [
        DEVICE.parameter().replace(default="auto"),
        parameter("crash", Crash),
        parameter("kills", Kills),
        *trainer_command("plan").parameters(["json"]),
    ],
    "Tell whether this machine can train: GPU, driver, libraries, programs, disk, Hub; or whether a folder keeps runs.",
)
def examine(device: str, crash: Path | None, kills: int | None, **options: Any) -> None:
    """Print what `doctor` finds."""
    from orchestrator import doctor
    from orchestrator.paths import Roots, shown

    roots = Roots.from_environment()
    if crash:
        if device not in ("auto", "cpu"):
            raise CommandError(f"--crash trains on the CPU: leave out --device {device}")
        findings = doctor.examine_crashes(crash, kills or 100, roots, terminal.complain)
        problem = f"{shown(crash)} cannot be trusted with runs:"
    elif kills:
        raise CommandError("--kills says how often --crash kills: name a folder with --crash DIR")
    else:
        findings = doctor.examine(device, roots)
        problem = "this machine cannot train on what is asked:"
    _report(findings, problem, options["json"])


def _report(findings: list[Finding], problem: str, is_json: bool) -> None:
    """Print findings; end with the bad ones."""
    from orchestrator import doctor
    from orchestrator.screen import finding

    if is_json:
        terminal.result(json.dumps(doctor.as_json(findings)))
    else:
        for entry in findings:
            finding(entry.topic, entry.text, entry.verdict.value)
    if bad := [entry.text for entry in findings if entry.verdict is doctor.Verdict.BAD]:
        raise CommandError("\n".join([problem, *bad]))
