"""Training speed on this CPU against PyTorch, interleaved in one run. `make bench-cpu` calls it.

Every round runs each contender once, one after the other: first with training steps, then generating, then with single
operations. Ratios are taken within a round and their median is reported, so that a machine that slows down slows all of
them. Writes one JSON line per measurement to a file, and prints tables of it (`report.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from contenders import GENERATION, OPERATIONS, OURS, PEERS, SHAPES, Programs, Row
from report import ROWS, report

MEASURES = ("steps", "generation", "operations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--measure", choices=MEASURES, nargs="+", default=list(MEASURES))
    parser.add_argument("--seconds", type=float, default=0.3, help="that an operation is measured for")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where the measurements go")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, arguments.rows.open("w") as file:
        programs = Programs.build(Path(folder), arguments.threads)
        if "operations" in arguments.measure:
            print(f"built {programs.operations}", file=sys.stderr)  # before anything is measured

        def note(shape: str, number: int, contender: str, measured_rows: list[Row]) -> None:
            new = [{"shape": shape, "round": number, "contender": contender, **row} for row in measured_rows]
            rows.extend(new)
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            print(f"{shape}, round {number}: {contender}", file=sys.stderr, flush=True)

        for shape in arguments.shape:
            for number in range(arguments.rounds):
                for contender in [*OURS, *PEERS] if "steps" in arguments.measure and SHAPES[shape].steps else []:
                    note(shape, number, contender, [programs.step(contender, shape)])
                for contender in GENERATION if "generation" in arguments.measure and SHAPES[shape].tokens else ():
                    note(shape, number, contender, programs.generation_rows(contender, shape))
                for contender in OPERATIONS if "operations" in arguments.measure else ():
                    note(shape, number, contender, programs.operation_rows(contender, shape, arguments.seconds))
    print(report(rows))
    print(f"\nEvery measurement: {arguments.rows}")


if __name__ == "__main__":
    main()
