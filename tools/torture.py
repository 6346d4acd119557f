"""Kill every session of the programme before every system call that changes a file, and cut the power at each.

    PYTHONPATH=tests .venv/bin/python tools/torture.py --root DIR                      all of it
    PYTHONPATH=tests .venv/bin/python tools/torture.py --root DIR --only train export  these parts
    PYTHONPATH=tests .venv/bin/python tools/torture.py --root DIR --every 10           every tenth call

Prints progress, each problem, and a table of counts; the exit code is 1 if anything differed. It can be killed at any
time and started again: what is in DIR/results.jsonl is not repeated. Remove DIR to repeat everything.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from file_operations import record_operations
from kill_programme import complete, is_hit, kill_until_hit
from kill_sessions import RUN, Session, copy, log_of, training_sessions
from kill_tools import export, preparation, search
from power_loss import ANY, KEPT, LOST, PowerLoss, broken_promise, power_losses, write_out
from system_calls import INSTALL, Call
from workspace import Workspace

TRAINER, TOOLS = ("train", "resume", "rewind"), ("prepare", "export", "search")
PARTS = (*TRAINER, *TOOLS, *(f"power-{name}" for name in TRAINER))
SURVIVALS = (LOST, KEPT, ANY, ANY)
SECONDS_BETWEEN_LINES = 30


@dataclass(frozen=True)
class Row:
    """What came of one kill or power loss."""

    part: str
    key: str
    """Which call or moment of the part it is."""
    phase: str
    kind: str
    """`changing`, `other`, `power` or `missed`."""
    call: str
    problems: list[str]


@dataclass
class Results:
    """The rows of this and earlier starts, in a file."""

    file: Path
    rows: dict[tuple[str, str], Row]

    @classmethod
    def load(cls, file: Path) -> Results:
        """Read the rows of earlier starts."""
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]
        return cls(file, {(row.part, row.key): row for row in rows})

    def add(self, row: Row) -> None:
        """Keep a row, and print its problems."""
        self.rows[row.part, row.key] = row
        with self.file.open("a") as output:
            output.write(json.dumps(asdict(row)) + "\n")
        for problem in row.problems:
            print(f"{row.part}: {row.call}: {problem}", flush=True)


def main() -> None:
    """Run the parts that are asked for and print the counts of all that has been run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the sessions and the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the programme")
    parser.add_argument("--every", type=int, default=1, help="only every n-th call")
    parser.add_argument("--seed", type=int, default=1, help="seed of what a power loss keeps and tears")
    arguments = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit(INSTALL)
    arguments.root.mkdir(parents=True, exist_ok=True)
    results = Results.load(arguments.root / "results.jsonl")
    # On the path of the first start, so that labels are the same.
    root = arguments.root.resolve() / "sessions"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    trainer = {session.name: session for session in training_sessions(root)}
    for part in arguments.only:
        if part.startswith("power-"):
            session = trainer[part.removeprefix("power-")]
            rows = cut_power(part, session, root, arguments.every, arguments.seed, results)
        else:
            rows = kill(part, trainer.get(part) or tool(part, trainer, root), root, arguments.every, results)
        for row in with_progress(part, rows):
            results.add(row)
    print_table(list(results.rows.values()))
    sys.exit(any(row.problems for row in results.rows.values()))


def tool(part: str, trainer: dict[str, Session], root: Path) -> Session:
    """Prepare a session of `orchestrate`."""
    if part == "prepare":
        return preparation(root, trainer["train"].base / "text.jsonl")
    return export(root, trainer["rewind"].base) if part == "export" else search(root, trainer["train"].base)


def kill(part: str, session: Session, root: Path, every: int, results: Results) -> Iterator[Row | None]:
    """Kill a session at every call that no earlier start has killed at; yields None for those."""
    for phase, call in complete(session, every):
        key = f"{call.name} {call.ordinal}"
        if (part, key) in results.rows:
            yield None
            continue
        killed = kill_until_hit(session, call, root / "work")
        kind = ("changing" if call.changes_files else "other") if is_hit(call, killed) else "missed"
        at = short(killed.call if killed else call, root)
        yield Row(part, key, phase, kind, f"killed before {at}", killed.problems if killed else [])


def short(call: Call, root: Path) -> str:
    """Return a call's label with paths relative to the folder that it works in."""
    return call.label.replace(f"{root / 'work'}/", "")


def cut_power(part: str, session: Session, root: Path, every: int, seed: int, results: Results) -> Iterator[Row | None]:
    """Cut the power after every call of a session; yields None for moments that an earlier start has tried."""
    workspace = copy(session.base, root / "work")
    operations = record_operations(session.command, workspace.root, workspace.environment, log_of(workspace.root))
    chance = random.Random(f"{seed} {part}")
    losses = list(power_losses(session.base, workspace.root, operations, chance, SURVIVALS))
    for number, loss in enumerate(losses[::every]):
        key = f"{seed} {number * every}"
        yield None if (part, key) in results.rows else cut(part, key, session, loss, workspace)


def cut(part: str, key: str, session: Session, loss: PowerLoss, workspace: Workspace) -> Row:
    """Leave on the disk what a power loss does, and resume."""
    write_out(loss.contents, workspace.root)
    broken = broken_promise(loss, f"{RUN}/checkpoints")
    problems = session.problems(workspace) + ([broken] if broken else [])
    what = f"power lost after operation {loss.calls}, each change survives with a chance of {loss.survival}"
    return Row(part, key, f"power loss ({session.name})", "power", what, problems)


def with_progress(part: str, rows: Iterator[Row | None]) -> Iterator[Row]:
    """Print from time to time how far a part is."""
    start = last = time.monotonic()
    number = 0
    for number, row in enumerate(rows, 1):
        if row is not None:
            yield row
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{part}: {number} done in {last - start:.0f} s", flush=True)
    print(f"{part}: all {number} done in {time.monotonic() - start:.0f} s", flush=True)


def print_table(rows: list[Row]) -> None:
    """Print the counts of each phase: kills before calls that change files, before others, power losses."""
    print(f"{'phase':28} {'changing':>8} {'others':>8} {'power':>8} {'missed':>8} {'equal':>8} {'differ':>8}")
    phases = list(dict.fromkeys(row.phase for row in rows))
    for phase in [*phases, "all"]:
        these = [row for row in rows if phase in (row.phase, "all")]
        kinds = [sum(row.kind == kind for row in these) for kind in ("changing", "other", "power", "missed")]
        differ = sum(bool(row.problems) for row in these)
        equal = sum(not row.problems and row.kind != "missed" for row in these)
        print(f"{phase:28} " + " ".join(f"{number:8,}" for number in (*kinds, equal, differ)))


if __name__ == "__main__":
    main()
