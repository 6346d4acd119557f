"""Batches of packed tokens from text: this project against `datasets`, `tokenizers` and PyTorch's DataLoader.

`make bench-data` calls it. Every round runs each contender once, one after the other, in a process of its own; ratios
are taken within a round and their median is reported. Nearly an epoch of the material is read from a local folder and
from a Hub on loopback that waits before each answer; then batches are taken at a trainer's pace; then the cost of a
resume is measured (`resume.py`). Prints one JSON line per measurement, and one per ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import material
from processes import fake_hub, run_worker
from resume import resume
from setting import NAME, Setting

CONTENDERS = ("ours", "ours-tokenizers", "datasets")
SHARE = 0.95
"""Fraction of the material that is read, not all of it: a loader's workers do not end together."""
Hubs = dict[str, tuple[str, str] | None]


def say(**row: Any) -> None:
    print(json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}), flush=True)


def batches(description: dict[str, Any], share: float) -> int:
    """Return the number of batches that a fraction of the material fills."""
    setting = Setting(Path(), Path(), None)
    return int(description["tokens"] * share / setting.sequences / setting.sequence_length)


def read(root: Path, hubs: Hubs, rounds: int, description: dict[str, Any]) -> None:
    options = {"batches": batches(description, SHARE)}
    for source, hub in hubs.items():
        speeds: list[dict[str, float]] = []
        for number in range(rounds):
            speeds.append({})
            for contender in CONTENDERS:
                answer = run_worker(contender, "read", root, hub, options)
                speed = speeds[-1][contender] = answer["tokens"] / answer["seconds"]
                megabytes = speed * description["text_bytes"] / description["tokens"] / 1e6
                rates = {"megabytes_per_second": megabytes, "tokens_per_second": round(speed)}
                say(task="read", source=source, round=number, contender=contender, **rates, **answer)
        for ours in CONTENDERS[:-1]:
            ratios = [speed[ours] / speed["datasets"] for speed in speeds]
            say(task="read", source=source, ratio=f"{ours} / datasets", median=statistics.median(ratios))


def pace(root: Path, hubs: Hubs, seconds: float) -> None:
    for source, hub in hubs.items():
        for contender in ("ours", "datasets"):
            answer = run_worker(contender, "pace", root, hub, {"seconds": seconds})
            say(task="pace", source=source, contender=contender, **answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=300, help="text of this machine to read")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer of the Hub")
    parser.add_argument("--pace-seconds", type=float, default=90)
    parser.add_argument("--depth-megabytes", type=int, help="text behind the point of resuming; two thirds of all")
    parser.add_argument("--root", type=Path, required=True, help="where the material is, or is made")
    arguments = parser.parse_args()
    depth = arguments.depth_megabytes or arguments.megabytes * 2 // 3
    if depth >= arguments.megabytes:
        parser.error(f"behind {depth} of {arguments.megabytes} megabytes nothing is left to resume with")
    root = arguments.root
    description = material.make(root, arguments.megabytes)
    say(task="material", load=os.getloadavg()[0], **description)
    with fake_hub(root, arguments.latency) as address:
        hubs: Hubs = {"local": None, "hub": (NAME, address)}
        read(root, hubs, arguments.rounds, description)
        pace(root, hubs, arguments.pace_seconds)
    for row in resume(root, batches(description, depth / arguments.megabytes)):
        say(task="resume", **row)
    say(task="end", load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
