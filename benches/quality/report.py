"""Prints the tables of docs/leaderboard.md from the results of the quality bench.

    python benches/quality/report.py [--results DIR] [--reference ROW]

With --reference: the fraction of that row's tokens and seconds after which each row stays below its final loss,
by linear interpolation between evaluations. The loss falls most in the decay at the end of a run, so only shorter
runs, the rows that end in `half`, say what fewer tokens reach.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Result = dict[str, Any]


def load(folder: Path) -> dict[str, Result]:
    """The results of a folder by the names of their rows."""
    files = sorted(folder.glob("*.json"))
    return {result["row"]: result for result in (json.loads(file.read_text()) for file in files)}


def reached(result: Result, loss: float) -> tuple[float, float] | None:
    """Tokens and seconds after which the held-out loss stays at or below `loss`."""
    point = None
    curve = [(0, 0, 0.0, float("inf")), *result["curve"]]
    for (_, tokens, seconds, before), (_, next_tokens, next_seconds, after) in pairwise(curve):
        if after > loss:
            point = None
        elif point is None:
            part = 1.0 if before == float("inf") else (before - loss) / (before - after)
            point = (tokens + part * (next_tokens - tokens), seconds + part * (next_seconds - seconds))
    return point


def table(results: dict[str, Result]) -> str:
    """Markdown: the rows, the lowest loss first; a row that was dropped before its end has fewer tokens."""
    lines = [
        "| row | parameters | tokens | FLOPs | seconds | loss | bits per byte | commit |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for result in sorted(results.values(), key=lambda result: (result["config"], result["loss"])):
        lines.append(
            f"| {result['row']} | {result['parameters'] / 1e6:.1f} M | {result['tokens'] / 1e6:.2f} M "
            f"| {result['flops']:.2e} | {result['seconds']:,.0f} | {result['loss']:.4f} "
            f"| {result['bits_per_byte']:.4f} | {result['commit']} |"
        )
    return "\n".join(lines)


def compare(results: dict[str, Result], reference: str) -> str:
    """Markdown: what of the reference's tokens and seconds each row of its config needs for the reference's loss."""
    base = results[reference]
    lines = [f"| to {reference}'s {base['loss']:.4f} | of its tokens | of its seconds |", "|---|--:|--:|"]
    for name, result in results.items():
        if result["config"] == base["config"] and (point := reached(result, base["loss"])):
            tokens, seconds = point
            lines.append(f"| {name} | {tokens / base['tokens']:.2f} | {seconds / base['seconds']:.2f} |")
    return "\n".join(lines)


def seeds(results: dict[str, Result]) -> str:
    """Markdown: mean and standard deviation of rows that were trained with several seeds."""
    groups: dict[str, list[float]] = {}
    for name, result in results.items():
        groups.setdefault(name.partition("-seed")[0], []).append(result["loss"])
    lines = ["| row | seeds | mean loss | standard deviation |", "|---|--:|--:|--:|"]
    for name, losses in groups.items():
        if len(losses) > 1:
            lines.append(f"| {name} | {len(losses)} | {mean(losses):.4f} | {stdev(losses):.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="what run.py wrote")
    parser.add_argument("--reference", help="the row to compare with")
    arguments = parser.parse_args()
    results = load(arguments.results)
    parts = [table(results), seeds(results)]
    if arguments.reference:
        parts.append(compare(results, arguments.reference))
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
