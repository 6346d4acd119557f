"""fp8 beside bf16, seed by seed: the difference of the held-out losses, and what it is worth in tokens.

    .venv-oracle/bin/python benches/quality/precision.py --root DIR --device cuda

Each seed trains the row in both precisions, on the same batches from the same weights, until the standard error of the
mean difference is at most --error nats. The first seeds are also trained in bf16 on a quarter more tokens: what that
gains says how many more tokens fp8 needs for an equal loss, and so how much faster it has to be. Rows that are complete
are not repeated, as in run.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from rows import SEEDS, Row
from run import BUILT, RESULTS, Bench

ROW = "10m-muon-0.005-half-recipe"
FEWEST, LONGER = 4, 4
"""Pairs at least, and seeds that are trained longer too."""
TWO_SIDED_95 = 1.96
MORE_TOKENS = 1.25


@dataclass(frozen=True)
class Comparison:
    """Losses in fp8 less those in bf16, in nats."""

    pairs: int
    mean: float
    standard_error: float
    # Tokens that fp8 needs for the loss of bf16, over those of bf16; None where more tokens gained nothing.
    tokens_for_equal_loss: float | None

    @property
    def upper_bound(self) -> float:
        """The upper end of the 95 % interval of the mean."""
        return self.mean + TWO_SIDED_95 * self.standard_error

    def __str__(self) -> str:
        line = f"fp8 - bf16 over {self.pairs} seeds: {self.mean:+.4f} nats, standard error {self.standard_error:.4f}, "
        line += f"at most {self.upper_bound:+.4f} (95 %)"
        if self.tokens_for_equal_loss is None:
            return line
        return f"{line}; {self.tokens_for_equal_loss:.3f} times the tokens for an equal loss"


def compare(bf16: Sequence[float], fp8: Sequence[float], longer: Sequence[float]) -> Comparison:
    """Compare losses by seed; `longer` are those in bf16 on a quarter more tokens, of the first seeds."""
    differences = [ours - theirs for ours, theirs in zip(fp8, bf16, strict=True)]
    error = stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else float("inf")
    gains = [short - long for short, long in zip(bf16, longer, strict=False)]
    gain = mean(gains) if gains else 0.0
    # Loss falls by the same amount each time that tokens grow by the same factor, over such a range.
    tokens = MORE_TOKENS ** (mean(differences) / gain) if gain > 0 else None
    return Comparison(len(differences), mean(differences), error, tokens)


def rows_of(row: Row, seed: int) -> dict[str, Row]:
    """Return the runs of a seed: in bf16, in fp8, and in bf16 on more tokens."""
    seeded = replace(row, name=f"{row.name}-precision{seed}", seed=seed)
    warmup = int(row.value("scheduler.warmup_steps", "48"))
    longer = {"total_steps": row.steps, "warmup_steps": warmup}
    keys = [f"scheduler.{key}={round(MORE_TOKENS * steps)}" for key, steps in longer.items()]
    bf16 = "runtime.precision=bf16"
    return {
        "bf16": seeded.changed("bf16", bf16),
        "fp8": seeded.changed("fp8", "runtime.precision=fp8"),
        "longer": seeded.changed("bf16-longer", bf16, *keys),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", default=ROW)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the bench, kept from run to run")
    parser.add_argument("--results", type=Path, default=RESULTS / "precision")
    parser.add_argument("--program", type=Path, default=BUILT)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--error", type=float, default=0.005, metavar="NATS")
    parser.add_argument("--most", type=int, default=60, metavar="N", help="seeds at most")
    options = parser.parse_args()
    bench = Bench(options.root.resolve(), options.program.resolve(), options.results.resolve(), options.device)
    row = bench.row(options.row)
    losses: dict[str, list[float]] = {"bf16": [], "fp8": [], "longer": []}
    for number in range(options.most):
        for name, run in rows_of(row, SEEDS[0] + number).items():
            if name == "longer" and number >= LONGER:
                continue
            bench.train(run)
            losses[name].append(bench.loss(run))
        comparison = compare(losses["bf16"], losses["fp8"], losses["longer"])
        print(comparison, flush=True)
        if comparison.pairs >= FEWEST and comparison.standard_error <= options.error:
            return


if __name__ == "__main__":
    main()
