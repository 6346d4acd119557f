"""Training speed on this CPU against PyTorch, interleaved in one run. `make bench-cpu` calls it.

Every round runs each contender once, one after the other; ratios are taken inside a round and their median is told, so
that a machine that slows down slows all of them. Prints one JSON line a measurement, then one a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
STEPS = {"s1": 150, "s2": 6}
OURS = {"ours-fp32": "fp32", "ours-bf16": "bf16"}
PEERS = {
    "eager-fp32": "eager",
    "compile-fp32": "compile",
    "compile-fp32-unlocked": "compile",
    "compile-bf16-autocast": "compile-autocast-bf16",
    "compile-bf16-weights": "compile-bf16-weights",
}
RATIOS = (
    ("ours-fp32", "compile-fp32"),
    ("ours-fp32", "compile-fp32-unlocked"),
    ("ours-bf16", "compile-bf16-autocast"),
    ("ours-bf16", "compile-bf16-weights"),
)


def trainer() -> Path:
    """The newest build of the trainer."""
    builds = [TARGET / profile / "transformer-candle" for profile in ("release", "debug")]
    return max((path for path in builds if path.exists()), key=lambda path: path.stat().st_mtime)


def unlock_mkl(folder: Path) -> Path:
    library = folder / "mkl_unlock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HERE / "mkl_unlock.c"], check=True)
    return library


def command(contender: str, shape: str, threads: int) -> list[str]:
    config, steps = str(HERE / f"{shape}.yaml"), str(STEPS[shape])
    if contender in OURS:
        overrides = [f"runtime.precision={OURS[contender]}", f"runtime.threads={threads}"]
        options = [word for override in overrides for word in ("--override", override)]
        return [str(trainer()), "bench", "--config", config, "--steps", steps, *options]
    options = ["--config", config, "--steps", steps, "--threads", str(threads), "--mode", PEERS[contender]]
    return [sys.executable, str(HERE / "peer.py"), *options]


def measure(contender: str, shape: str, threads: int, unlocked: Path) -> dict[str, float]:
    """Run a contender in a process of its own; its speed, and the most memory it had resident."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if contender.endswith("unlocked"):
        environment |= {"LD_PRELOAD": str(unlocked), "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    process = subprocess.Popen(
        command(contender, shape, threads),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout
    answer = json.loads(process.stdout.read().splitlines()[-1])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{contender} on {shape} ended with {process.returncode}")
    return {"tokens_per_second": answer["tokens_per_second"], "peak_mebibytes": usage.ru_maxrss // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", choices=sorted(STEPS), nargs="+", default=sorted(STEPS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unlocked = unlock_mkl(Path(folder))
        for shape in arguments.shape:
            rounds = []
            for number in range(arguments.rounds):
                rounds.append({name: measure(name, shape, arguments.threads, unlocked) for name in (*OURS, *PEERS)})
                for name, row in rounds[-1].items():
                    print(json.dumps({"shape": shape, "round": number, "contender": name, **row}), flush=True)
            for ours, peer in RATIOS:
                ratios = [row[ours]["tokens_per_second"] / row[peer]["tokens_per_second"] for row in rounds]
                median = round(statistics.median(ratios), 3)
                print(json.dumps({"shape": shape, "ratio": f"{ours} / {peer}", "median": median}), flush=True)


if __name__ == "__main__":
    main()
