"""Where runs, tokenizers and cached data live: the environment's roots or the defaults, read in this one place."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.command_error import CommandError

EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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


def checked_experiment(name: str) -> str:
    """Return `name` if it can be a folder's name everywhere, or raise a `CommandError`."""
    if not EXPERIMENT.fullmatch(name):
        raise CommandError(
            f"--experiment {name!r} is not a name: use up to 64 letters, digits, dots, dashes and underscores, "
            "the first one a letter or a digit"
        )
    return name


def shown(path: Path) -> str:
    """Return the path as messages print it: whole."""
    return str(path.absolute())
