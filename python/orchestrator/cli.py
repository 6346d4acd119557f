"""The command `orchestrate`: its commands put together, and how a run of it ends: in a sentence and an exit code."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import typer
from typer.exceptions import Abort, TyperException

from orchestrator import _native, start_screen, terminal, urls, written_files
from orchestrator.arguments import Group, stopped, usage_error
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.commands import models, runs, training
from orchestrator.habits import hyphenated
from orchestrator.help_text import WIDTH
from orchestrator.pipeline_options import takes_settings
from orchestrator.settings import Settings
from orchestrator.signals import Stopped, stoppable

app = typer.Typer(
    name="orchestrate",
    cls=Group,
    help="Stream a text data set, train a tokenizer, pre-train a Llama-style model.\n\n"
    "Without a command it does all of it: resolve the data set, train the tokenizer, write the run's files, train.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": hyphenated,
        "max_content_width": WIDTH,
    },
)


@app.callback(invoke_without_command=True)
@takes_settings
def pipeline(context: typer.Context, settings: Settings) -> None:
    """Run the pipeline when no command is named."""
    if context.invoked_subcommand is None:
        from orchestrator.pipeline import run

        raise typer.Exit(run(settings))


GROUPS = (training.app, runs.app, models.app)
for group in GROUPS:
    app.add_typer(group)

COMMANDS = {str(command.name) for group in GROUPS for command in group.registered_commands}
"""The names of the commands."""


def main() -> None:
    """Run the command and turn every failure into a sentence and an exit code."""
    sys.exit(_run(sys.argv[1:], before=_prepare_process))


def _prepare_process() -> None:
    terminal.take_over()
    threading.excepthook = _complain_of_a_thread


def _run(arguments: list[str], before: Callable[[], None] = lambda: None) -> int:
    try:
        before()
        if not arguments:
            terminal.result(start_screen.TEXT.rstrip("\n"))
            return ExitCode.DONE
        with stoppable():
            words = _with_resume_values(arguments)
            return int(app(words, prog_name="orchestrate", standalone_mode=False) or ExitCode.DONE)
    except Stopped as end:
        return _complain(str(end), end.code)
    except CommandError as failure:
        return _complain(str(failure), failure.code)
    except TyperException as error:
        return _complain(usage_error(error), error.exit_code)
    except (Abort, KeyboardInterrupt):
        return _complain(str(stopped()), ExitCode.INTERRUPTED)
    except OSError as error:
        return _complain(written_files.explain(error), ExitCode.UNEXPECTED)
    except MemoryError:
        return _complain("this machine has no memory left: close other programs", ExitCode.OUT_OF_MEMORY)
    except SystemExit:
        raise
    except BaseException as error:  # PyO3's PanicException is not an Exception
        return _complain(*_explained(error))


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the message and exit code of what the trainer raised, or of a bug with its file and line."""
    if isinstance(error, _native.TrainerError):
        return str(error), error.exit_code
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"a bug, please report it: {type(error).__name__} at {where}: {error}", ExitCode.UNEXPECTED


def _complain_of_a_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        _complain(*_explained(failure.exc_value))


def _complain(message: str, code: int) -> int:
    terminal.complain(f"orchestrate: {urls.redacted(message)}")
    return code


def _with_resume_values(arguments: list[str]) -> list[str]:
    """Give a bare `--resume` its value: Typer has no options whose value may be left out."""
    filled = []
    for here, following in zip_longest(arguments, arguments[1:]):
        bare = here == "--resume" and (following is None or following.startswith("-") or following in COMMANDS)
        filled.append("--resume=latest" if bare else here)
    return filled
