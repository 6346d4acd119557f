"""Damage checkpoints and the files beside them in every way, and print what is noticed.

The tests in `test_damage.py` take a part of the same damage. This is all of it, for a machine that has the time:

    python tests/damage_programme.py --seed 7 --resumes 300 --run-files 1

The last line of each table has the sums. The exit code is 1 if anything was not noticed, not named, or lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from damage import Damage, StoredFolder, replaced
from damaged_checkpoints import KINDS, NEWEST, OLDER, SavedRun, Verdict, all_damage, resume, saved_run, verify
from damaged_run_files import (
    RUN_FILES,
    Outcome,
    file_damage,
    pointer_damage,
    resume_damaged,
    saved_text_run,
    trained,
    write_documents,
)
from fake_hub import FakeHub, write_fineweb
from workspace import Workspace

MOST_SHOWN = 5


class Table:
    """Rows of counts by kind of damage, and the first inputs that failed."""

    def __init__(self, title: str, columns: Iterable[str]) -> None:
        self.title, self.columns = title, list(columns)
        self.rows: dict[str, Counter[str]] = {}
        self.failures: list[str] = []

    def add(self, damage: Damage, holds: Iterable[str], failure: str) -> None:
        """Count an input with the columns that hold of it; `failure` says what does not, if anything."""
        self.rows.setdefault(damage.kind, Counter()).update(["inputs", *holds])
        if failure:
            self.failures.append(f"{damage}: {failure}")

    def print(self) -> None:
        total = sum(self.rows.values(), Counter())
        width = max(map(len, [self.title, *self.rows]))
        print(f"\n{self.title:{width}}  {'inputs':>8}", *(f"{column:>15}" for column in self.columns))
        for kind, counts in [*self.rows.items(), ("all", total)]:
            print(f"{kind:{width}}  {counts['inputs']:8,}", *(f"{counts[column]:15,}" for column in self.columns))
        for failure in self.failures[:MOST_SHOWN]:
            print(f"  {failure}")
        if len(self.failures) > MOST_SHOWN:
            print(f"  and {len(self.failures) - MOST_SHOWN:,} more")
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Damage checkpoints and run files, and count what is noticed.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--part", type=float, default=1.0, help="the part of bytes, bits and lengths of checkpoints")
    parser.add_argument("--resumes", type=int, default=300, help="inputs for which a run is resumed as well")
    parser.add_argument("--run-files", type=float, default=1.0, help="the part of bytes and lengths of run files")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}")
    failures = []
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        for kind in KINDS if options.part > 0 else ():
            failures += checkpoint_tables(Path(folder), kind, options)
        if options.run_files > 0:
            failures += run_file_table(Path(folder), options)
    return 1 if failures else 0


def checkpoint_tables(root: Path, kind: str, options: argparse.Namespace) -> list[str]:
    """Damage the newest checkpoint of a run of KINDS; print two tables and return what failed."""
    columns = list(Verdict.__annotations__)
    chance = random.Random(f"{options.seed} {kind}")
    run, other = saved_run(root / kind, kind), saved_run(root / f"other {kind}", kind, "runtime.seed=9")
    rate = saved_run(root / f"{kind} of another rate", kind, "optimizer.learning_rate=1e-2")
    folder = StoredFolder.of(run.checkpoints / NEWEST)
    whole = [
        replaced(folder, run.checkpoints / OLDER, "an older checkpoint"),
        replaced(folder, other.checkpoints / NEWEST, "a checkpoint of another run"),
        replaced(folder, rate.checkpoints / NEWEST, "one of a run of another rate"),
    ]
    damage = [*all_damage(run, other, chance, options.part), *whole]
    verified, resumed = Table(f"{kind}, verified", columns), Table(f"{kind}, resumed", columns)
    for item in damage:
        count(verified, item, verify(folder, item))
    verified.print()
    case = root / "case"
    reference = run.copy(case)
    reference.train("--resume").succeeded()
    results = reference.results()
    for item in [*chance.sample(damage, min(options.resumes, len(damage))), *whole]:
        count(resumed, item, resume(run.copy(case), item, results))
    resumed.print()
    return verified.failures + resumed.failures


def count(table: Table, damage: Damage, verdict: Verdict) -> None:
    """Count an input with what holds of it."""
    table.add(damage, [name for name, holds in vars(verdict).items() if holds], ", ".join(verdict.problems))


def run_file_table(root: Path, options: argparse.Namespace) -> list[str]:
    """Damage the files beside the checkpoints of a local and of a streamed run; print a table, return what failed."""
    table = Table("run files", [outcome.name.lower() for outcome in Outcome])
    chance = random.Random(f"{options.seed} run files")
    workspace = Workspace(root / "text")
    workspace.root.mkdir()
    local = saved_text_run(workspace, f"--input={write_documents(workspace)}")
    resume_each(table, local, RUN_FILES, chance, options.run_files, root / "case")
    write_fineweb(root / "hub")
    with FakeHub(root / "hub") as hub:
        workspace = Workspace(root / "streamed", hub.environment(root / "hf"))
        workspace.root.mkdir()
        streamed = saved_text_run(workspace, "--stream", "--dataset=HuggingFaceFW/fineweb", "--max-samples=60")
        resume_each(table, streamed, ["streaming_config.json"], chance, options.run_files, root / "case")
    table.print()
    return table.failures


def resume_each(
    table: Table, run: SavedRun, names: Iterable[str], chance: random.Random, part: float, case: Path
) -> None:
    """Damage files of a run and count what a resume makes of it."""
    reference = run.copy(case)
    reference.train("--resume").succeeded()
    expected = trained(reference)
    assert expected
    damage = [item for name in names for item in file_damage(run, name, chance, part)]
    damage += [item for pointer in ("latest", "best") for item in pointer_damage(pointer, chance)]
    for item in damage:
        outcome = resume_damaged(run.copy(case), item, expected).outcome
        table.add(item, [outcome.name.lower()], "" if outcome.is_sound else outcome.value)


if __name__ == "__main__":
    sys.exit(main())
