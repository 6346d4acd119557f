"""The command `orchestrate`: the pipeline when no command is given, and what one does with a run."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from orchestrator import terminal
from orchestrator.arguments import Command, Group, stopped
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.settings import (
    ConfigFile,
    DeviceName,
    Launch,
    LaunchMode,
    Overrides,
    Preset,
    Rebatch,
    Resume,
    Settings,
    takes_settings,
)
from orchestrator.signals import Stopped, answered

app = typer.Typer(
    name="orchestrate",
    cls=Group,
    help="Stream a text data set, train a tokenizer, pre-train a Llama-style model.\n\n"
    "Without a command it does all of it: resolve the data set, train the tokenizer, write the run's files, train.",
    no_args_is_help=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkpoint = Annotated[Path | None, typer.Option(help="A checkpoint directory.")]
Experiment = Annotated[str | None, typer.Option(metavar="NAME", help="The newest checkpoint of this experiment.")]
ModelDevice = Annotated[str, typer.Option(metavar="[auto|cpu|cuda|cuda:N]", help="Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
@takes_settings
def pipeline(context: typer.Context, settings: Settings) -> None:
    """Run the pipeline when no command is named."""
    if context.invoked_subcommand is None:
        from orchestrator.pipeline import run

        raise typer.Exit(run(settings))


@app.command(cls=Command)
def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run's config: YAML, TOML or JSON.")],
    override: Overrides = None,
    resume: Resume = None,
    rebatch: Rebatch = False,
    device: DeviceName = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop, saved, after so many steps in all.")] = None,
    launch: LaunchMode = Launch.AUTO,
) -> None:
    """Train as a config says: what streaming_config.json beside it streams, else its train_shards."""
    from orchestrator.launch import Job, start
    from orchestrator.paths import Roots

    if launch is Launch.NONE:
        raise CommandError("--launch none has nothing to do here: `train` trains")
    job = Job(config, override or [], resume, device, max_steps, rebatch)
    raise typer.Exit(start(job, launch, Roots.from_environment().target))


@app.command(cls=Command)
def plan(config: ConfigFile = None, preset: Preset = None, override: Overrides = None, as_json: Json = False) -> None:
    """Print what a run needs: parameters, bytes by category, FLOPs a token, disk, time."""
    from orchestrator import _native
    from orchestrator.base_config import preset_file

    if (config is None) == (preset is None):
        raise CommandError("say what to plan: --config FILE or --preset NAME")
    with tempfile.TemporaryDirectory() as folder:
        path = config if config is not None else preset_file(str(preset), Path(folder))
        needs = _native.memory_plan(_native.RunConfig.load_for_planning(path, override or []))
    _answer(needs.to_dict(), str(needs), as_json)


@app.command(cls=Command)
def doctor(
    device: ModelDevice = "auto",
    as_json: Json = False,
) -> None:
    """Tell whether this machine can train: card, driver, libraries, programs, disk, Hub."""
    from orchestrator import doctor
    from orchestrator.paths import Roots
    from orchestrator.screen import finding

    findings = doctor.examine(device, Roots.from_environment())
    if as_json:
        terminal.product(json.dumps(doctor.as_json(findings)))
    else:
        for found in findings:
            finding(found.topic, found.text, found.verdict.value)
    problems = [found.text for found in findings if found.verdict is doctor.Verdict.BAD]
    if problems:
        raise CommandError("\n".join(["this machine cannot train on what is asked:", *problems]))


@app.command(cls=Command)
def generate(
    checkpoint: Checkpoint = None,
    experiment: Experiment = None,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the text to go on from.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Choose among the likeliest that make up p.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    device: ModelDevice = "auto",
    as_json: Json = False,
) -> None:
    """Write text with a checkpoint."""
    from orchestrator import _native

    if (prompt is None) == (prompt_file is None):
        raise CommandError("say what to go on from: --prompt TEXT or --prompt-file FILE")
    text = prompt if prompt_file is None else _read_prompt(prompt_file)
    answer = _native.generate(
        _checkpoint(checkpoint, experiment), str(text),
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, device=device,
    )  # fmt: skip
    # Exact where it goes to a file or a program; a terminal would obey what is in it.
    text = answer.prompt + answer.completion
    if as_json:
        text = json.dumps(answer.to_dict())
    elif sys.stdout.isatty():
        text = terminal.escaped(text)
    terminal.product(text)


@app.command(cls=Command)
def evaluate(
    checkpoint: Checkpoint = None,
    experiment: Experiment = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="Text to evaluate on: a file, folder or glob. Default: what the run held out."
        ),
    ] = None,
    text_column: Annotated[str, typer.Option(metavar="NAME", help="The column or field that holds the text.")] = "text",
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Sequences to evaluate at most.")] = None,
    device: ModelDevice = "auto",
    as_json: Json = False,
) -> None:
    """Measure a checkpoint's loss on held-out text."""
    from orchestrator import _native

    report = _native.evaluate(_checkpoint(checkpoint, experiment), input or [], text_column, max_sequences, device)
    bits = f", {report.bits_per_byte:.3f} bits a byte" if report.bits_per_byte is not None else ""
    lines = [f"loss {report.loss:.4f}, perplexity {report.perplexity:.2f}{bits} ({report.tokens:,} tokens)"]
    for part in report.to_dict().get("components", []):
        lines.append(f"  {part['share']:.1%} {part['name']}: loss {part['loss']:.4f} ({part['tokens']:,} tokens)")
    _answer(report.to_dict(), "\n".join(lines), as_json)


@app.command("validate-data", cls=Command)
def validate_data(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    replay: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STEP", min=1, help="Make this step's batch again too, and compare it with the step's. Repeatable."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove from a run's ledger that every document of an epoch was used exactly once."""
    from orchestrator import _native

    report = _native.validate_data(run, replay or [])
    _answer(report.to_dict(), str(report).rstrip(), as_json)
    if report.problems:
        raise typer.Exit(ExitCode.DATA_UNREADABLE)


def main() -> None:
    """Run the command and turn every failure into a sentence and an exit code."""
    terminal.take_over()
    sys.exit(_run(_with_resume_values(sys.argv[1:])))


def _run(arguments: list[str]) -> int:
    try:
        with answered():
            return int(app(arguments, prog_name="orchestrate", standalone_mode=False) or ExitCode.DONE)
    except Stopped as end:
        return _complain(str(end), end.code)
    except CommandError as failure:
        return _complain(str(failure), failure.code)
    except TyperException as error:
        return _complain(f"{error.format_message()} (orchestrate --help lists what there is)", error.exit_code)
    except (Abort, KeyboardInterrupt):
        return _complain(str(stopped()), ExitCode.INTERRUPTED)
    except OSError as error:
        return _complain(str(error), ExitCode.UNEXPECTED)
    except SystemExit:
        raise
    except BaseException as error:  # a library's panic is no Exception
        return _complain(*_explained(error))


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the message and exit code of what the trainer raised, or name the place of a bug."""
    from orchestrator import _native

    if isinstance(error, _native.TrainerError):
        return str(error), error.exit_code
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"a bug, please report it: {type(error).__name__} at {where}: {error}", ExitCode.UNEXPECTED


def _complain(message: str, code: int) -> int:
    terminal.complain(f"orchestrate: {message}")
    return code


def _with_resume_values(arguments: list[str]) -> list[str]:
    """Give a bare `--resume` its value; Typer's options have one always or never."""
    filled = []
    for here, following in zip(arguments, [*arguments[1:], None], strict=True):
        bare = here == "--resume" and (following is None or following.startswith("-") or following in COMMANDS)
        filled.append("--resume=latest" if bare else here)
    return filled


def _answer(values: dict[str, Any], text: str, as_json: bool) -> None:
    """Print what was asked for, as one JSON object or for people."""
    if as_json:
        terminal.product(json.dumps(values))
    else:
        terminal.report(text)


def _checkpoint(checkpoint: Path | None, experiment: str | None) -> Path:
    """Return the folder that --checkpoint names, or the newest checkpoint of --experiment."""
    from orchestrator import _native

    if (checkpoint is None) == (experiment is None):
        raise CommandError("say which model: --checkpoint DIR or --experiment NAME")
    return checkpoint if checkpoint is not None else _native.newest_checkpoint(str(experiment))


def _read_prompt(path: Path) -> str:
    from orchestrator.input_files import read_text

    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read --prompt-file {path}: {error}") from error


COMMANDS = {str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
