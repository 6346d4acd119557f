"""Measures what several processes cost on the cores of one: a step of 1, 2 and 4 ranks on the same config.

`python benches/ranks/run.py CONFIG`: a config that `orchestrate --launch none` has prepared. All runs use the same
cores in all, and so compute the same in the same time; what a step takes longer is exchange and waiting. They take
turns, so that a machine that is busy at times is so for all. Prints one JSON line per number of ranks: the fastest and
the median step, and the megabytes that crossed the loopback device in a step beside what reduce-scatter and all-gather
must send at least, those of all ranks together. With `--virtual-shards V` each is measured a second time with
`runtime.deterministic_reduction: V`.

With `--peer` PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer take turns as well, on the same shape, step
and number of processes (`peer.py`); both then train with AdamW in f32. `--unlock-mkl` lets MKL, which PyTorch computes
with, take the code for Intel's processors on those of others.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from orchestrator import RunConfig, memory_plan

WARMUP = 2
MKL_UNLOCK = Path(__file__).resolve().parents[1] / "cpu" / "mkl_unlock.c"
PEERS = {"ddp": [], "ddp-compile": ["--compile"]}
"""The PyTorch contenders, and their options of `peer.py`."""


class Kind(NamedTuple):
    """A contender: a program and its number of processes."""

    program: str
    """`ours` or a key of `PEERS`."""
    ranks: int | None
    """None for one process without torchrun."""
    virtual_shards: int | None = None


@dataclass
class Measured:
    """The seconds of a kind's steps, and the bytes that crossed the loopback device in each run."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


def loopback_bytes() -> int:
    """Return the bytes that the machine has sent to itself."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


def ours(config: Path, kind: Kind, steps: int, environment: dict[str, str], settings: list[str]) -> list[float]:
    """Train in a copy of the run's folder, and return the times of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(config.parent, Path(folder) / "run") / config.name
        settings = [
            "runtime.evaluation.every_n_steps=null",
            "runtime.log_every_n_steps=1",
            f"runtime.deterministic_reduction={kind.virtual_shards or 'null'}",
            *settings,
        ]
        words = [f"--max-steps={steps}", *(f"--override={setting}" for setting in settings)]
        nproc = [] if kind.ranks is None else [f"--nproc={kind.ranks}"]
        command = [Path(sys.executable).parent / "orchestrate", "train", f"--config={copy}", *nproc, *words]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        rows = map(json.loads, (copy.parent / "metrics.jsonl").read_text().splitlines())
        return [row["step_seconds"] - row["data_wait_seconds"] for row in rows if row["kind"] == "train"]


def theirs(config: Path, kind: Kind, steps: int, environment: dict[str, str]) -> list[float]:
    """Train with PyTorch, and return the times of the steps."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kind.ranks}"]
    program = [Path(__file__).with_name("peer.py"), config, f"--steps={steps}", *PEERS[kind.program]]
    command = [sys.executable, *(torchrun if kind.ranks else []), *program]
    process = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    seconds = json.loads(process.stdout.splitlines()[-1])
    assert isinstance(seconds, list)
    return seconds


def unlocked(folder: Path) -> dict[str, str]:
    """Return the environment variables with which MKL takes every processor for one of Intel's."""
    library = folder / "mkl_unlock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, MKL_UNLOCK], check=True)
    return {"LD_PRELOAD": str(library)}


def measure(
    config: Path, kind: Kind, steps: int, settings: list[str], preloaded: dict[str, str], into: Measured
) -> None:
    """Measure steps on all cores, without those for warming up, and add them to `into`."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // (kind.ranks or 1)))
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    before = loopback_bytes()
    if kind.program == "ours":
        seconds = ours(config, kind, steps, environment, settings)
    else:
        seconds = theirs(config, kind, steps, environment | preloaded)
    into.sent_bytes.append(loopback_bytes() - before)
    into.seconds += seconds[WARMUP:]


def row(kind: Kind, measurements: dict[Kind, Measured], bound: float, steps: int) -> dict[str, object]:
    """Return the JSON line of a kind; `bound` is the bytes that its ranks must send per step at least."""
    times, alone = measurements[kind].seconds, measurements[Kind(kind.program, None)].seconds
    values: dict[str, object] = {
        "program": kind.program,
        "ranks": kind.ranks,
        "virtual_shards": kind.virtual_shards,
        "fastest_seconds": round(min(times), 3),
        "median_seconds": round(statistics.median(times), 3),
        "fastest_over_one_process": round(min(times) / min(alone), 3),
        "loopback_megabytes": round(min(measurements[kind].sent_bytes) / steps / 1e6, 1),
        "least_megabytes": round(bound / 1e6, 1),
    }
    for peer in PEERS:
        peers = measurements.get(Kind(peer, None if kind.ranks == 1 else kind.ranks))
        if kind.program == "ours" and peers:
            values[f"fastest_over_{peer}"] = round(min(times) / min(peers.seconds), 3)
            values[f"median_over_{peer}"] = round(statistics.median(times) / statistics.median(peers.seconds), 3)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--virtual-shards", type=int)
    parser.add_argument("--peer", choices=PEERS, nargs="*", default=[])
    parser.add_argument("--unlock-mkl", action="store_true")
    arguments = parser.parse_args()
    config = RunConfig.load(arguments.config)
    settings = ["optimizer.algorithm=adamw", "runtime.precision=fp32"] if arguments.peer else []
    precision = "fp32" if arguments.peer else config.to_dict()["runtime"]["precision"]
    least = memory_plan(config).parameters * (6 if precision == "bf16" else 8)
    reductions = [None, arguments.virtual_shards] if arguments.virtual_shards else [None]
    kinds = [Kind("ours", *each) for each in itertools.product((None, *arguments.ranks), reductions)]
    several = (ranks for ranks in (None, *arguments.ranks) if ranks != 1)
    kinds += [Kind(peer, ranks) for ranks in several for peer in arguments.peer]
    kinds.sort(key=lambda kind: kind.ranks or 0)
    measurements = {kind: Measured() for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        preloaded = unlocked(Path(folder)) if arguments.unlock_mkl else {}
        for _ in range(arguments.rounds):
            for kind in kinds:
                measure(arguments.config, kind, arguments.steps, settings, preloaded, measurements[kind])
    for kind in kinds:
        print(json.dumps(row(kind, measurements, least * ((kind.ranks or 1) - 1), arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
