"""Prints the tables of docs/leaderboard.md from the results of the quality bench.

    python benches/quality/report.py [--results DIR] [--write FILE]

With --write it replaces the tables of FILE, which stand between two comments.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Result = dict[str, Any]
Curve = list[tuple[int, float, float]]
"""Step, tokens and held-out loss of each evaluation."""
Speed = dict[str, Any]
SPEEDS = "speed"
REFERENCES = {
    "AdamW tuned by its rate": re.compile(r"10m-adamw-[\d.]+"),
    "AdamW with a recipe of its own": re.compile(r"10m-adamw-[\d.]+-recipe"),
}
"""Rows of which the best is compared with all others, by the title of the table."""
BEGIN, END = "<!-- tables of report.py -->", "<!-- end of the tables -->"


def load(folder: Path) -> dict[str, Result]:
    """Return the results of a folder by the names of their rows."""
    results = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json"), key=lambda file: file.stem))
    return {result["row"]: result for result in results}


def load_speeds(folder: Path) -> list[Speed]:
    """Return the seconds per token by kind of row, for each machine on which they are measured."""
    return [json.loads(file.read_text()) for file in sorted((folder / SPEEDS).glob("*.json"))]


def reached(curve: Curve, loss: float) -> float | None:
    """Return the tokens after which the held-out loss stays at or below `loss`; None if it does not."""
    point = None
    for (_, tokens, before), (_, next_tokens, after) in pairwise([(0, 0.0, float("inf")), *curve]):
        if after > loss:
            point = None
        elif point is None:
            part = 1.0 if before == float("inf") else (before - loss) / (before - after)
            point = tokens + part * (next_tokens - tokens)
    return point


def kind(config: str, overrides: Collection[str]) -> str:
    """Return what a row's time per token depends on: its config, optimizer and whether it has QK-norm."""
    key = "optimizer.algorithm="
    algorithm = next((text.removeprefix(key) for text in overrides if text.startswith(key)), "adamw")
    return f"{config}-{algorithm}" + "-qk-norm" * ("model.architecture=qwen3" in overrides)


def seconds(result: Result, speeds: list[Speed]) -> float:
    """Return a row's time: for ours by its machine's measured time per token if there is one, else by its own steps."""
    speed = next((speed for speed in speeds if speed["machine"] == result["machine"]), None)
    if speed is None or "-pytorch" in result["row"] or result["row"].startswith("width"):
        return float(result["seconds"])
    return float(result["tokens"] * speed[kind(result["config"], result["overrides"])])


def groups(results: dict[str, Result]) -> dict[str, list[Result]]:
    """Return rows that differ by their seed only, by the name of the first."""
    results_by_row: dict[str, list[Result]] = {}
    for name, result in results.items():
        results_by_row.setdefault(without_seed(name), []).append(result)
    return results_by_row


def without_seed(name: str) -> str:
    """Return a row's name without its seed."""
    return re.sub(r"-seed\d+", "", name)


def mean_curve(results: list[Result]) -> Curve:
    """Return steps, tokens and mean loss of rows of the same length."""
    points = zip(*(result["curve"] for result in results), strict=True)
    return [(seeds[0][0], mean(seed[1] for seed in seeds), mean(seed[3] for seed in seeds)) for seeds in points]


def table(results: dict[str, Result], speeds: list[Speed]) -> str:
    """Return in Markdown the groups of each config, the lowest mean loss first."""
    lines = [
        "| row | parameters | tokens | seconds | FLOPs | seeds | loss | standard deviation | bits per byte | commit "
        "| machine |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    rows = [(name, seeds, [seed["loss"] for seed in seeds]) for name, seeds in groups(results).items()]
    for name, seeds, losses in sorted(rows, key=lambda row: (row[1][0]["config"], mean(row[2]))):
        first = seeds[0]
        deviation = f"{stdev(losses):.4f}" if len(seeds) > 1 else ""
        bits = mean(seed["bits_per_byte"] for seed in seeds)
        machines = ", ".join(dict.fromkeys(seed["machine"] for seed in seeds))
        lines.append(
            f"| {name} | {first['parameters'] / 1e6:.1f} M | {first['tokens'] / 1e6:.2f} M "
            f"| {seconds(first, speeds):,.1f} | {first['flops']:.2e} | {len(seeds)} | {mean(losses):.4f} "
            f"| {deviation} | {bits:.4f} | {first['commit']} | {machines} |"
        )
    return "\n".join(lines)


def compare(results: dict[str, Result], speeds: list[Speed], references: re.Pattern[str]) -> str:
    """Return in Markdown what part of the best reference's tokens and seconds our rows need for its mean loss.

    Losses are means over the seeds, interpolated between evaluations. The loss falls most in the decay of a run, so
    only shorter runs say what fewer tokens reach. Empty if no reference has several seeds.
    """
    ours = {name: seeds for name, seeds in groups(results).items() if is_compared(name) and len(seeds) > 1}
    curves = {name: mean_curve(seeds) for name, seeds in ours.items()}
    base = min(filter(references.fullmatch, ours), key=lambda name: curves[name][-1][2], default=None)
    if base is None:
        return ""
    of_base, (_, all_tokens, loss) = kind("10m", ours[base][0]["overrides"]), curves[base][-1]
    machines = [speed["machine"] for speed in speeds]
    lines = [
        f"| to {base}'s {loss:.4f} | of its tokens |" + "".join(f" of its seconds, {name} |" for name in machines),
        "|---|--:|" + "--:|" * len(machines),
    ]
    for name, seeds in ours.items():
        if tokens := reached(curves[name], loss):
            ratio, of_row = tokens / all_tokens, kind("10m", seeds[0]["overrides"])
            parts = [ratio, *(ratio * speed[of_row] / speed[of_base] for speed in speeds)]
            lines.append(f"| {name} |" + "".join(f" {part:.2f} |" for part in parts))
    return "\n".join(lines)


def is_compared(name: str) -> bool:
    """Whether a row is one of the contenders: of 10 M, ours, and no variant of a recipe."""
    return name.startswith("10m-") and "-pytorch" not in name and "-recipe-" not in name


def effects(results: dict[str, Result]) -> str:
    """Return in Markdown how far rows with a change of a recipe end above the row that they change.

    Means over pairs of the same seed, with their standard errors.
    """
    lines = ["| recipe | change | pairs of seeds | loss above the recipe's | standard error |", "|---|---|--:|--:|--:|"]
    above: dict[tuple[str, str], list[float]] = {}
    for name, result in results.items():
        row, _, change = without_seed(name).partition("-recipe-")
        recipe = results.get(name.replace(f"-recipe-{change}", "-recipe"))
        if change and recipe:
            above.setdefault((f"{row}-recipe", change), []).append(result["loss"] - recipe["loss"])
    for (row, change), pairs in sorted(above.items(), key=lambda one: (one[0][0], mean(one[1]))):
        error = f"{stdev(pairs) / len(pairs) ** 0.5:.3f}" if len(pairs) > 1 else ""
        lines.append(f"| {row} | {change} | {len(pairs)} | {mean(pairs):+.3f} | {error} |")
    return "\n".join(lines)


def sections(results: dict[str, Result], speeds: list[Speed]) -> Iterator[str]:
    """Yield in Markdown every table that there are results for."""
    complete = {name: result for name, result in results.items() if result["complete"]}
    incomplete = {name: result for name, result in results.items() if not result["complete"]}
    for title, references in REFERENCES.items():
        if parts := compare(complete, speeds, references):
            yield f"### Tokens and seconds to the loss of {title}\n\n{parts}"
    if any("-recipe-" in name for name in complete):
        yield "### Changes of a recipe\n\n" + effects(complete)
    if complete:
        yield "### Complete rows\n\n" + table(complete, speeds)
    if incomplete:
        yield "### Not trained to the end\n\n" + table(incomplete, speeds)


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
    tables = "\n\n".join(sections(load(arguments.results), load_speeds(arguments.results)))
    if arguments.write:
        arguments.write.write_text(rewrite(arguments.write.read_text(), tables))
    else:
        print(tables)


if __name__ == "__main__":
    main()
