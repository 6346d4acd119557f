"""Trains the rows of the quality bench, and writes a result for each that is complete.

    .venv-oracle/bin/python benches/quality/run.py --root DIR              the whole bench, row by row
    .venv-oracle/bin/python benches/quality/run.py --root DIR ROW...       these rows
    .venv-oracle/bin/python benches/quality/run.py --root DIR --list      what is complete

It can be killed at any time and started again: a row resumes from its checkpoint, a complete one is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import text
from rows import QUARTER, RATES, Row, after_sweep, better_half, sweep, transfer

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release" / "transformer-candle"
VOCABULARY = 4096


class Bench:
    """The folder of a bench: text, tokenizer, one run directory and one result per row."""

    def __init__(self, root: Path, program: Path) -> None:
        self.root, self.program = root, program
        self.text = text.prepare(root / "text")
        self.tokenizer = root / "artifacts" / "tokenizer" / "quality" / "tokenizer.json"
        if not self.tokenizer.exists():
            flags = ["--config", str(HERE / "10m.yaml"), "--input=text/train.jsonl", "--experiment=quality"]
            flags += ["--validation=text/validation.jsonl", f"--vocab-size={VOCABULARY}", "--launch=none"]
            subprocess.run([Path(sys.executable).parent / "orchestrate", *flags], cwd=root, check=True)

    def overrides(self, row: Row) -> list[str]:
        texts = self.root / "text"
        keys = [
            f"tokenizer.tokenizer_json={self.tokenizer}", f"data.train_shards=[{texts / 'train.jsonl'}]",
            f"data.validation_shards=[{texts / 'validation.jsonl'}]", f"runtime.seed={row.seed}", *row.overrides,
        ]  # fmt: skip
        return [f"--override={key}" for key in keys]

    def train(self, row: Row, max_steps: int | None = None) -> None:
        """Trains a row up to a step, or to its end."""
        folder = self.root / "runs" / row.name
        if (self.root / "results" / f"{row.name}.json").exists():
            return
        if max_steps and any(step >= max_steps for step, *_ in self.curve(row)):
            return
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text((HERE / f"{row.config}.yaml").read_text())
        command = [str(self.program), "train", f"--config={config}", *self.overrides(row)]
        command += ["--resume"] * (folder / "checkpoints" / "latest").exists()
        command += [f"--max-steps={max_steps}"] * bool(max_steps)
        subprocess.run(command, check=True)
        if max_steps is None:
            self.write_result(row)

    def metrics(self, row: Row) -> list[dict[str, Any]]:
        file = self.root / "runs" / row.name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def curve(self, row: Row) -> list[tuple[int, int, float, float]]:
        """Step, tokens, seconds of training and held-out loss at each evaluation."""
        points, tokens, seconds = [], 0, 0.0
        for record in self.metrics(row):
            if record["kind"] == "train":
                tokens, seconds = record["tokens"], seconds + record["step_seconds"]
            else:
                points.append((record["step"], tokens, seconds, record["loss"]))
        return points

    def write_result(self, row: Row) -> None:
        last = [record for record in self.metrics(row) if record["kind"] == "evaluation"][-1]
        plan = [str(self.program), "plan", f"--config={self.root / 'runs' / row.name / 'config.yaml'}", "--json"]
        planned = json.loads(subprocess.run([*plan, *self.overrides(row)], capture_output=True, check=True).stdout)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
        curve = self.curve(row)
        result = {
            "row": row.name, "config": row.config, "overrides": row.overrides, "seed": row.seed, "text": self.text,
            "commit": commit.stdout.strip(), "parameters": planned["parameters"], "tokens": curve[-1][1],
            "seconds": round(curve[-1][2], 1), "flops": planned["flops_per_token"] * curve[-1][1],
            "loss": last["loss"], "bits_per_byte": last["bits_per_byte"], "curve": curve,
        }  # fmt: skip
        (self.root / "results").mkdir(exist_ok=True)
        (self.root / "results" / f"{row.name}.json").write_text(json.dumps(result) + "\n")

    def loss(self, row: Row, step: int | None = None) -> float:
        """The held-out loss at a step, or at the end."""
        return next(loss for at, _, _, loss in reversed(self.curve(row)) if step is None or at == step)

    def train_everything(self) -> None:
        """The sweeps by successive halving, then the rows of their winners, then the widths."""
        winners = []
        for algorithm in RATES:
            rows = sweep(algorithm)
            for row in rows:
                self.train(row, QUARTER)
            rows = better_half(rows, lambda row: self.loss(row, QUARTER))
            for row in rows:
                self.train(row)
            winners.append(min(rows, key=self.loss))
        for row in [*after_sweep(*winners), *transfer(False), *transfer(True)]:
            self.train(row)


def known_rows() -> dict[str, Row]:
    """Every row that does not depend on another one's result."""
    return {row.name: row for row in [*sweep("adamw"), *sweep("muon"), *transfer(False), *transfer(True)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--root", type=Path, required=True, help="the folder of the bench, kept from run to run")
    parser.add_argument("--program", type=Path, default=BUILT, help="the trainer; `make build` makes it")
    parser.add_argument("--list", action="store_true", help="print what is complete")
    arguments = parser.parse_args()
    bench = Bench(arguments.root.resolve(), arguments.program.resolve())
    if arguments.list:
        for file in sorted((bench.root / "results").glob("*.json")):
            result = json.loads(file.read_text())
            print(
                f"{result['row']:<40} {result['loss']:.4f} {result['tokens']:>11,} tokens {result['seconds']:>8,.0f} s"
            )
        return
    known = known_rows()
    if unknown := [name for name in arguments.rows if name not in known]:
        sys.exit(f"no such row: {', '.join(unknown)}. There are: {', '.join(known)}")
    for name in arguments.rows:
        bench.train(known[name])
    if not arguments.rows:
        bench.train_everything()


if __name__ == "__main__":
    main()
