"""The folders of runs, tokenizers and cached data: the environment's roots or the defaults, read in this one place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.command_error import CommandError

EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class RunLocation:
    """The name of a run, its folder and its tokenizer's."""

    experiment: str
    folder: Path
    tokenizer: Path
    is_usual: bool
    """Whether the folder is the experiment's own, so that its name is enough to find it."""

    @property
    def flags(self) -> str:
        """The flags that select this run on the command line."""
        where = "" if self.is_usual else f" --run-dir {quoted(self.folder)}"
        return f"--experiment {self.experiment}{where}"

    @property
    def typed(self) -> str:
        """The run as a command line names it: its name, or its folder."""
        return self.experiment if self.is_usual else quoted(self.folder)


@dataclass(frozen=True)
class Roots:
    """The folders below which everything is written."""

    runs: Path
    tokenizers: Path
    target: Path | None
    """Cargo's build folder, where one is named."""

    @staticmethod
    def from_environment() -> Roots:
        """Read `ORCHESTRATE_RUNS_ROOT`, `ORCHESTRATE_TOKENIZER_ROOT` and `CARGO_TARGET_DIR`."""
        target = os.environ.get("CARGO_TARGET_DIR")
        return Roots(
            runs=Path(os.environ.get("ORCHESTRATE_RUNS_ROOT") or "runs"),
            tokenizers=Path(os.environ.get("ORCHESTRATE_TOKENIZER_ROOT") or Path("artifacts", "tokenizer")),
            target=Path(target) if target else None,
        )

    def location_of(self, folder: Path) -> RunLocation:
        """Return the location of a run that is there: an experiment's, or one in a folder of its own."""
        name = folder.name
        if folder.absolute() == (self.runs / name).absolute() and EXPERIMENT.fullmatch(name):
            return self.location(name, None)
        usable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"
        return self.location(usable[:64], folder)

    def location(self, experiment: str, run_dir: Path | None, flag: str = "--experiment") -> RunLocation:
        """Return the location of an experiment, or raise a `CommandError` if its name cannot be that of a folder.

        Args:
            experiment: Its name.
            run_dir: The run's folder, if it is not named after the experiment.
            flag: The option that named it.
        """
        if not EXPERIMENT.fullmatch(experiment):
            raise CommandError(
                f"{flag} {experiment!r} is not a name: use up to 64 letters, digits, dots, dashes and "
                "underscores, the first one a letter or a digit"
            )
        location = RunLocation(
            experiment, run_dir or self.runs / experiment, self.tokenizers / experiment, run_dir is None
        )
        for folder in (location.folder.absolute(), location.tokenizer.absolute()):
            if not is_utf8(str(folder)):
                raise CommandError(
                    f"the name of {folder} is not UTF-8, so no file of a run can hold it: work elsewhere"
                )
        return location


def quoted(path: Path) -> str:
    """Return the path as it is typed in a shell."""
    return shlex.quote(str(path))


def is_utf8(text: str) -> bool:
    """Whether a string from the system is valid UTF-8: Python keeps other bytes as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shown(path: Path) -> str:
    """Return the path as messages print it: absolute."""
    return str(path.absolute())


def this_command() -> str:
    """Return what to type for this command: its name where the shell finds it, else its path."""
    program = Path(sys.argv[0])
    program_on_path = shutil.which("orchestrate")
    if program.name != "orchestrate" or (program_on_path and Path(program_on_path).resolve() == program.resolve()):
        return "orchestrate"
    return typed(program)


def typed(path: Path) -> str:
    """Return the path as it is typed in a shell in the current folder."""
    return quoted(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
