"""Trains the rows of the quality bench, and writes a result for each into `results/` beside this file.

    .venv-oracle/bin/python benches/quality/run.py --root DIR              the whole bench
    .venv-oracle/bin/python benches/quality/run.py --root DIR ROW...       these rows
    .venv-oracle/bin/python benches/quality/run.py --root DIR --list       every row's result
    .venv-oracle/bin/python benches/quality/run.py --root DIR --speed      the time per token of each kind of row

With --device cuda --jobs 8 a GPU trains eight rows side by side; NVIDIA's MPS, if it runs, lets them share it well.
It can be killed at any time and started again: a row resumes from its checkpoint, a complete one is not repeated. To
repeat everything, write the results elsewhere with --results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

import text
from report import SPEEDS, kind, load
from rows import QK_NORM, RATES, SEEDS, Row, after_sweep, contenders, sweep, transfer

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release" / "transformer-candle"
RESULTS = HERE / "results"
VOCABULARY = 4096

Curve = list[tuple[int, int, float, float]]
"""Step, tokens, seconds of training and held-out loss of each evaluation. Seconds are tokens times `quiet_time`."""


class Bench:
    """A folder with the bench's text, tokenizer and one run directory per row, and a folder of results."""

    def __init__(self, root: Path, program: Path, results: Path = RESULTS, device: str = "cpu") -> None:
        self.root, self.program, self.results, self.device = root, program, results, device
        self.text = text.prepare(root / "text")
        self.tokenizer = root / "artifacts" / "tokenizer" / "quality" / "tokenizer.json"
        if not self.tokenizer.exists():
            flags = ["--config", str(HERE / "10m.yaml"), "--input=text/train.jsonl", "--experiment=quality"]
            flags += ["--validation=text/validation.jsonl", f"--vocab-size={VOCABULARY}", "--launch=none"]
            subprocess.run([Path(sys.executable).parent / "orchestrate", *flags], cwd=root, check=True)

    def overrides(self, row: Row) -> list[str]:
        """Return the keys that a row sets, as `KEY=VALUE`."""
        texts = self.root / "text"
        # All of a step's sequences at once, and the same bits in every run on one GPU.
        gpu = [f"runtime.device={self.device}", "runtime.deterministic=true", "data.gradient_accumulation_steps=1"]
        return [
            f"tokenizer.tokenizer_json={self.tokenizer}", f"data.train_shards=[{texts / 'train.jsonl'}]",
            f"data.validation_shards=[{texts / 'validation.jsonl'}]", f"runtime.seed={row.seed}",
            *(gpu if self.device != "cpu" else []),
            *row.overrides,
        ]  # fmt: skip

    def write_config(self, row: Row, folder: Path) -> Path:
        """Write a row's config file into the folder of a run."""
        config = folder / "config.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text((HERE / f"{row.config}.yaml").read_text())
        return config

    def flags(self, row: Row) -> list[str]:
        """Write a row's config file; return the trainer's flags for the row."""
        config = self.write_config(row, self.root / "runs" / row.name)
        return [f"--config={config}", *[f"--override={key}" for key in self.overrides(row)]]

    def held_out_texts(self) -> list[str]:
        """Return the texts of the evaluation, in order."""
        lines = (self.root / "text" / "validation.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]

    def train(self, row: Row, max_steps: int | None = None) -> None:
        """Train a row up to a step, or to its end, and write its result."""
        result = self.result(row.name)
        if result and (result["complete"] or (max_steps and result["curve"][-1][0] >= max_steps)):
            return
        command = [str(self.program), "train", *self.flags(row)]
        command += ["--resume"] * (self.root / "runs" / row.name / "checkpoints" / "latest").exists()
        command += [f"--max-steps={max_steps}"] * bool(max_steps)
        log = self.root / "runs" / row.name / "log.txt"
        with log.open("a") as output:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        if code:
            sys.exit(f"{row.name} ended with exit code {code}: {log.read_text().strip().splitlines()[-1]}")
        last = [record for record in self.metrics(row) if record["kind"] == "evaluation"][-1]
        self.write_result(row, row.name, self.curve(row), last["bits_per_byte"], complete=max_steps is None)

    def metrics(self, row: Row) -> list[dict[str, Any]]:
        file = self.root / "runs" / row.name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def curve(self, row: Row) -> Curve:
        """Return the held-out loss of a run so far."""
        evaluations, steps, tokens = [], [], 0
        for record in self.metrics(row):
            if record["kind"] == "train":
                steps.append(record["step_seconds"] / (record["tokens"] - tokens))
                tokens = record["tokens"]
            elif record["kind"] == "evaluation":
                evaluations.append((record["step"], tokens, record["loss"]))
        per_token = quiet_time(steps)
        return [(step, tokens, tokens * per_token, loss) for step, tokens, loss in evaluations]

    def result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a row so far, if any. End the program if the row was trained on another text."""
        path = self.results / f"{name}.json"
        result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        if result and result["text"] != self.text:
            sys.exit(f"{path} is of text {result['text']}, this bench's is {self.text}: give another --results folder")
        return result

    def write_result(self, row: Row, name: str, curve: Curve, bits_per_byte: float | None, complete: bool) -> None:
        """Write the result `name` of a run of `row`, with its curve."""
        plan = [str(self.program), "plan", *self.flags(row), "--json"]
        plan_report = json.loads(subprocess.run(plan, capture_output=True, check=True).stdout)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
        _, tokens, seconds, loss = curve[-1]
        result = {
            "row": name, "complete": complete, "config": row.config, "overrides": row.overrides, "seed": row.seed,
            "text": self.text, "commit": commit.stdout.strip(), "machine": machine(self.device), "loss": loss,
            "bits_per_byte": bits_per_byte, "parameters": plan_report["parameters"], "tokens": tokens,
            "seconds": round(seconds, 1), "flops": plan_report["flops_per_token"] * tokens, "curve": curve,
        }  # fmt: skip
        self.results.mkdir(exist_ok=True)
        (self.results / f"{name}.json").write_text(json.dumps(result) + "\n")

    def measure_speed(self, rounds: int, steps: int = 10) -> None:
        """Write the seconds per token of each kind of row on this machine, the medians of interleaved rounds."""
        sweep_rows = [sweep(algorithm, config)[0] for config in ("10m", "25m") for algorithm in RATES]
        rows = {
            kind(row.config, row.overrides): row
            for row in chain(sweep_rows, (row.changed("q", QK_NORM) for row in sweep_rows))
        }
        measurements: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(rounds):
            for name, row in rows.items():
                bench = [str(self.program), "bench", "--json", *self.flags(row), f"--steps={steps}"]
                result = json.loads(subprocess.run(bench, capture_output=True, check=True).stdout)
                measurements[name].append(1 / result["tokens_per_second"])
        speed = {name: median(values) for name, values in measurements.items()}
        folder = self.results / SPEEDS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.device}.json").write_text(
            json.dumps({"machine": machine(self.device), **speed}, indent=1) + "\n"
        )

    def loss(self, row: Row, step: int | None = None) -> float:
        """Return the held-out loss of a row with a result, at a step or at the end."""
        result = self.result(row.name)
        assert result is not None
        curve: Curve = result["curve"]
        return next(loss for at, _, _, loss in reversed(curve) if step is None or at == step)

    def finalists(self, sweep_rows: list[Row]) -> list[Row]:
        """Return the better half of a sweep, by the losses after a quarter of the steps."""
        return sorted(sweep_rows, key=lambda row: self.loss(row, row.steps // 4))[: len(sweep_rows) // 2]

    def winner(self, sweep_rows: list[Row]) -> Row:
        """Return the best row of a sweep whose finalists are complete, by the mean over its seeds."""
        return min(self.finalists(sweep_rows), key=lambda row: mean(map(self.loss, row.seeds())))

    def known_rows(self) -> dict[str, Row]:
        """Return every row by name; those after the sweeps for each rate, whichever wins."""
        sweep_rows = contenders()
        rows = [seed for row in chain(*sweep_rows.values()) for seed in row.seeds(len(SEEDS))]
        rows += chain(
            *(after_sweep(dict(zip(sweep_rows, best, strict=True))) for best in zip(*sweep_rows.values(), strict=True))
        )
        return {row.name: row for row in [*rows, *transfer()]}

    def row(self, name: str) -> Row:
        """Return the row of this name. End the program if there is none."""
        rows = self.known_rows()
        if name not in rows:
            near = get_close_matches(name, rows, n=5) or [*rows][:5]
            sys.exit(f"no such row: {name}. benches/quality/rows.py names them, for example {', '.join(near)}")
        return rows[name]

    def train_all(self, rows: Iterable[Row], jobs: int = 1, to_quarter: bool = False) -> None:
        """Train rows to the end or to a quarter of their steps, several side by side."""
        with ThreadPoolExecutor(jobs) as pool:
            for row in pool.map(lambda row: self.train_and_tell(row, row.steps // 4 if to_quarter else None), rows):
                print(row, flush=True)

    def train_and_tell(self, row: Row, max_steps: int | None) -> str:
        """Train a row; return a line with its loss. What the trainer prints is in its run directory's log.txt."""
        print(f"{row.name} ...", flush=True)
        self.train(row, max_steps)
        return f"{row.name:<44} {self.loss(row):.4f}"

    def train_everything(self, jobs: int) -> None:
        """Train the sweeps by successive halving, then the rows of the winners, then the widths."""
        sweep_rows = contenders()
        self.train_all(chain(*sweep_rows.values()), jobs, to_quarter=True)
        self.train_all(
            (seed for rows in sweep_rows.values() for row in self.finalists(rows) for seed in row.seeds()), jobs
        )
        best = {name: self.winner(rows) for name, rows in sweep_rows.items()}
        winners = [seed for row in best.values() for seed in row.seeds(len(SEEDS))]
        self.train_all([*winners, *after_sweep(best), *transfer()], jobs)


def machine(device: str) -> str:
    """Return the GPU's name, or the CPU's, its cores and its widest vector instructions."""
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "CPU")
    vectors = next((name for name in ("avx512_bf16", "avx512f", "avx2") if name in text), "no AVX2")
    return f"{model}, {os.cpu_count()} cores, {vectors}"


def quiet_time(seconds: list[float]) -> float:
    """Return the 10th percentile: what a step takes when the machine does nothing else."""
    return sorted(seconds)[len(seconds) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--root", type=Path, required=True, help="the folder of the bench, kept from run to run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--program", type=Path, default=BUILT, help="the trainer; `make build` makes it")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: other bits, since the micro-batch is larger")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows that are trained side by side")
    parser.add_argument("--list", action="store_true", help="print every row's result")
    parser.add_argument("--speed", action="store_true", help="measure the time per token; leave the machine alone")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of --speed")
    arguments = parser.parse_args()
    folders = arguments.root.resolve(), arguments.program.resolve(), arguments.results.resolve()
    bench = Bench(*folders, arguments.device)
    if arguments.list:
        for name, result in load(bench.results).items():
            print(f"{name:<40} {result['loss']:.4f} {result['tokens']:>11,} tokens {result['seconds']:>8,.0f} s")
        return
    if arguments.speed:
        bench.measure_speed(arguments.rounds)
        return
    if arguments.rows:
        bench.train_all([*map(bench.row, arguments.rows)], arguments.jobs)  # a misspelled name is told first
    else:
        bench.train_everything(arguments.jobs)


if __name__ == "__main__":
    main()
