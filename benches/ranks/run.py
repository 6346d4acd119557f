"""Measures what several processes cost on the cores of one: a step of 1, 2 and 4 ranks on the same config.

`python benches/ranks/run.py CONFIG`: a config that `orchestrate --launch none` has prepared. All runs use the same
cores in all, and so compute the same in the same time; what a step takes longer is exchange and waiting. They take
turns, so that a machine that is busy at times is so for all. Prints one JSON line per number of ranks: the fastest and
the median step, and the megabytes that crossed the loopback device in a step beside what reduce-scatter and all-gather
must send at least, those of all ranks together. With `--virtual-shards V` each is measured a second time with
`runtime.deterministic_reduction: V`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from orchestrator import RunConfig, memory_plan

WARMUP = 2


def loopback_bytes() -> int:
    """Return the bytes that the machine has sent to itself."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


def train(config: Path, ranks: int | None, shards: int | None, steps: int, cores: int) -> tuple[list[float], int]:
    """Train in a copy of the run's folder, and return the times of its steps and the bytes sent."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(config.parent, Path(folder) / "run") / config.name
        settings = [
            "runtime.evaluation.every_n_steps=null",
            "runtime.log_every_n_steps=1",
            f"runtime.deterministic_reduction={shards or 'null'}",
        ]
        words = [f"--max-steps={steps}", *(f"--override={setting}" for setting in settings)]
        nproc = [] if ranks is None else [f"--nproc={ranks}"]
        command = [Path(sys.executable).parent / "orchestrate", "train", f"--config={copy}", *nproc, *words]
        environment = {**os.environ, "RAYON_NUM_THREADS": str(max(1, cores // (ranks or 1)))}
        before = loopback_bytes()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        sent = loopback_bytes() - before
        rows = map(json.loads, (copy.parent / "metrics.jsonl").read_text().splitlines())
        seconds = [row["step_seconds"] - row["data_wait_seconds"] for row in rows if row["kind"] == "train"]
    return seconds[WARMUP:], sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--virtual-shards", type=int)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    config = RunConfig.load(arguments.config)
    parameters = memory_plan(config).parameters
    weight_bytes = 2 if config.to_dict()["runtime"]["precision"] == "bf16" else 4
    seconds: dict[tuple[int | None, int | None], list[float]] = {}
    sent: dict[tuple[int | None, int | None], list[int]] = {}
    reductions = [None, arguments.virtual_shards] if arguments.virtual_shards else [None]
    for _ in range(arguments.rounds):
        for kind in itertools.product((None, *arguments.ranks), reductions):
            times, moved = train(arguments.config, *kind, arguments.steps, cores)
            seconds.setdefault(kind, []).extend(times)
            sent.setdefault(kind, []).append(moved)
    for (ranks, shards), times in seconds.items():
        bound = parameters * (4 + weight_bytes) * ((ranks or 1) - 1)
        row = {
            "ranks": ranks,
            "virtual_shards": shards,
            "fastest_seconds": round(min(times), 3),
            "median_seconds": round(statistics.median(times), 3),
            "fastest_over_one_process": round(min(times) / min(seconds[None, None]), 3),
            "loopback_megabytes": round(min(sent[ranks, shards]) / arguments.steps / 1e6, 1),
            "least_megabytes": round(bound / 1e6, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
