"""Which errors of the disk are injected: a random sample of every kind of call, or all of them.

    PYTHONPATH=tests .venv/bin/python tests/disk_programme.py --root DIR             all of it
    PYTHONPATH=tests .venv/bin/python tests/disk_programme.py --root DIR --every 10  every tenth injection

Prints each problem and a table of counts; the exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from disk_errors import Injection, Outcome, continuing, inject, injections
from kill_sessions import Session, training_sessions
from kill_tools import preparation
from system_calls import INSTALL

INJECTIONS_BETWEEN_LINES = 100
COLUMNS = ("exit 0", "exit 1", "exit 2", "other", "missed", "wrong")


def sessions(root: Path) -> list[Session]:
    """Prepare the sessions of the trainer and the preparation of a run."""
    trainer = training_sessions(root)
    return [*trainer, preparation(root, trainer[0].base / "text.jsonl")]


def injections_of(session: Session, root: Path) -> list[Injection]:
    """Return every injection of a session; a session of the trainer is run in both modes."""
    if session.name == "prepare":
        return [injection for injection in injections({"stop": session}) if not injection.lasting]
    return injections({"stop": session, "continue": continuing(session, root / f"{session.name}-continue")})


def sample(candidates: Iterable[Injection], chance: random.Random) -> list[Injection]:
    """Draw an injection of every kind of call in every phase, in a random order."""
    strata = defaultdict(list)
    for injection in candidates:
        strata[injection.phase, injection.call.name].append(injection)
    return chance.sample([chance.choice(kind) for kind in strata.values()], len(strata))


def run(chosen: Iterable[Injection], work: Path) -> Iterator[tuple[Injection, Outcome]]:
    """Make every injection; yields what came of it."""
    for injection in chosen:
        yield injection, inject(injection, work)


def table(outcomes: Iterable[tuple[Injection, Outcome]]) -> str:
    """Return the counts of outcomes for each phase, call and error."""
    rows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for injection, outcome in outcomes:
        code = f"exit {outcome.code}" if outcome.code in (0, 1, 2) else "other"
        result = "wrong" if outcome.problems else code if outcome.failed else "missed"
        for row in ((injection.phase, injection.call.name, injection.error), ("all", "", "")):
            rows[row][result] += 1
    lines = [f"{'phase':24} {'call':10} {'error':7} {'total':>6} " + " ".join(f"{name:>6}" for name in COLUMNS)]
    for (phase, call, error), counts in sorted(rows.items(), key=lambda row: (row[0][0] == "all", row[0])):
        numbers = " ".join(f"{counts[name]:6,}" for name in COLUMNS)
        lines.append(f"{phase:24} {call:10} {error:7} {counts.total():6,} {numbers}")
    return "\n".join(lines)


def main() -> None:
    """Run the programme and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the sessions, which must not exist")
    parser.add_argument("--every", type=int, default=1, help="only every n-th injection")
    arguments = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit(INSTALL)
    root = arguments.root.resolve()
    root.mkdir(parents=True)
    chosen = [injection for session in sessions(root) for injection in injections_of(session, root)][:: arguments.every]
    outcomes = []
    for injection, outcome in run(chosen, root / "work"):
        outcomes.append((injection, outcome))
        if outcome.problems:
            print(injection, *outcome.problems, sep="\n", flush=True)
        if len(outcomes) % INJECTIONS_BETWEEN_LINES == 0:
            print(f"{len(outcomes):,} of {len(chosen):,} injections", flush=True)
    print(table(outcomes))
    sys.exit(any(outcome.problems for _, outcome in outcomes))


if __name__ == "__main__":
    main()
