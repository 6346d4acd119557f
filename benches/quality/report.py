"""Prints the tables of docs/leaderboard.md from the results of the quality bench.

    python benches/quality/report.py [--results DIR] [--write FILE]

With --write it replaces the tables of FILE, which stand between two comments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Result = dict[str, Any]
SPEED = "speed.json"
BEGIN, END = "<!-- tables of report.py -->", "<!-- end of the tables -->"


def load(folder: Path) -> dict[str, Result]:
    """Return the results of a folder by the names of their rows."""
    files = sorted(path for path in folder.glob("*.json") if path.name != SPEED)
    return {result["row"]: result for result in (json.loads(file.read_text()) for file in files)}


def load_speed(folder: Path) -> dict[str, float]:
    """Return the seconds per token by config and optimizer; empty if they are not measured."""
    path = folder / SPEED
    return json.loads(path.read_text()) if path.exists() else {}


def reached(result: Result, loss: float) -> float | None:
    """Return the tokens after which the held-out loss stays at or below `loss`; None if it does not."""
    point = None
    curve = [(0, 0, 0.0, float("inf")), *result["curve"]]
    for (_, tokens, _, before), (_, next_tokens, _, after) in pairwise(curve):
        if after > loss:
            point = None
        elif point is None:
            part = 1.0 if before == float("inf") else (before - loss) / (before - after)
            point = tokens + part * (next_tokens - tokens)
    return point


def kind(config: str, overrides: Collection[str]) -> str:
    """Return what a row's time per token depends on: its config, optimizer and whether it has QK-norm."""
    algorithm = next(key.partition("=")[2] for key in overrides if key.startswith("optimizer.algorithm="))
    return f"{config}-{algorithm}" + "-qk-norm" * ("model.architecture=qwen3" in overrides)


def seconds_per_token(result: Result, speed: dict[str, float]) -> float:
    """Return the time per token of rows of a result's kind, all measured in one run."""
    return speed[kind(result["config"], result["overrides"])]


def seconds(result: Result, speed: dict[str, float]) -> float:
    """Return a row's time: for ours by the measured time per token if there is one, else by the row's own steps."""
    ours = speed and "-pytorch" not in result["row"] and not result["row"].startswith("width")
    return float(result["tokens"] * seconds_per_token(result, speed) if ours else result["seconds"])


def table(results: dict[str, Result], speed: dict[str, float]) -> str:
    """Return in Markdown the rows of each config, the lowest loss first."""
    lines = [
        "| row | parameters | tokens | seconds | FLOPs | loss | bits per byte | commit | machine |",
        "|---|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for result in sorted(results.values(), key=lambda result: (result["config"], result["loss"])):
        lines.append(
            f"| {result['row']} | {result['parameters'] / 1e6:.1f} M | {result['tokens'] / 1e6:.2f} M "
            f"| {seconds(result, speed):,.0f} | {result['flops']:.2e} | {result['loss']:.4f} "
            f"| {result['bits_per_byte']:.4f} | {result['commit']} | {result['machine']} |"
        )
    return "\n".join(lines)


def compare(results: dict[str, Result], speed: dict[str, float]) -> str:
    """Return in Markdown the parts of the best 10 M AdamW row's tokens and seconds that our rows need for its loss.

    Rows have seed 1; losses between evaluations are interpolated. The loss falls most in the decay of a run, so
    only shorter runs, the rows with `half` in their names, say what fewer tokens reach.
    """
    ours = {name: result for name, result in results.items() if "-pytorch" not in name and "-seed" not in name}
    references = [result for name, result in ours.items() if name.startswith("10m-adamw")]
    base = min(references, key=lambda result: result["loss"])
    lines = [f"| to {base['row']}'s {base['loss']:.4f} | of its tokens | of its seconds |", "|---|--:|--:|"]
    for name, result in ours.items():
        tokens = reached(result, base["loss"])
        if tokens and result["config"] == base["config"]:
            ratio = tokens / base["tokens"]
            seconds = ratio * seconds_per_token(result, speed) / seconds_per_token(base, speed)
            lines.append(f"| {name} | {ratio:.2f} | {seconds:.2f} |")
    return "\n".join(lines)


def seeds(results: dict[str, Result]) -> str:
    """Return in Markdown mean and standard deviation of rows that were trained with several seeds."""
    groups: dict[str, list[float]] = {}
    for name, result in results.items():
        groups.setdefault(name.partition("-seed")[0], []).append(result["loss"])
    lines = ["| row | seeds | mean loss | standard deviation |", "|---|--:|--:|--:|"]
    for name, losses in groups.items():
        if len(losses) > 1:
            lines.append(f"| {name} | {len(losses)} | {mean(losses):.4f} | {stdev(losses):.4f} |")
    return "\n".join(lines)


def sections(results: dict[str, Result], speed: dict[str, float]) -> Iterator[str]:
    """Yield in Markdown every table that there are results for."""
    complete = {name: result for name, result in results.items() if result["complete"]}
    incomplete = {name: result for name, result in results.items() if not result["complete"]}
    if complete:
        yield "### Complete rows\n\n" + table(complete, speed)
    if any("-seed" in name for name in complete):
        yield "### Seeds\n\n" + seeds(complete)
    if speed and any(name.startswith("10m-adamw") for name in complete):
        yield "### Tokens and seconds to AdamW's loss\n\n" + compare(complete, speed)
    if incomplete:
        yield "### Not trained to the end\n\n" + table(incomplete, speed)


def rewrite(document: str, tables: str) -> str:
    """Return the document with its tables replaced."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="what run.py wrote")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the document to write the tables into")
    arguments = parser.parse_args()
    tables = "\n\n".join(sections(load(arguments.results), load_speed(arguments.results)))
    if arguments.write:
        arguments.write.write_text(rewrite(arguments.write.read_text(), tables))
    else:
        print(tables)


if __name__ == "__main__":
    main()
