"""The programs that are measured, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
PROFILES = {"release": "release", "debug": "dev"}
"""Cargo's profiles, by the folders of the target directory that their programs are in."""
UNLOCKED = "unlocked"
"""Suffix of contenders for which MKL takes every processor for Intel's, and whose allocator keeps freed memory."""
OURS = {"ours-fp32": "fp32", "ours-bf16": "bf16"}
DTYPES = {"ours-fp32": "f32", "ours-bf16": "bf16"}
"""The element type of each of our contenders, as operations and models name it."""
PEERS = {
    "eager-fp32": "eager",
    "compile-fp32": "compile",
    "compile-fp32-unlocked": "compile",
    "compile-bf16-autocast": "compile-autocast-bf16",
    "compile-bf16-weights": "compile-bf16-weights",
}
OPERATIONS = ("ours", "torch", "torch-unlocked")
GENERATION = ("transformers", "ours")
"""The contenders of generation, in the order in which they run: transformers writes the models."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The measurements of a config besides its operations; 0 leaves one out."""

    steps: int = 0
    """Training steps to measure."""
    tokens: int = 0
    """Tokens to generate."""


SHAPES = {"s1": Shape(steps=150), "s2": Shape(steps=6, tokens=480), "wide": Shape()}


@dataclass(frozen=True)
class Programs:
    """The programs built for a run of the benchmark, and how they are run."""

    trainer: Path
    mkl_unlock: Path
    scratch: Path
    threads: int

    @classmethod
    def build(cls, scratch: Path, threads: int) -> Programs:
        """Find the newest build of the trainer and build the library that unlocks MKL; `scratch` is an empty folder."""
        builds = [TARGET / folder / "transformer-candle" for folder in PROFILES]
        trainer = max((path for path in builds if path.exists()), key=lambda path: path.stat().st_mtime, default=None)
        if trainer is None:
            sys.exit(f"there is no trainer in {TARGET}: `make build` builds it")
        library = scratch / "mkl_unlock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HERE / "mkl_unlock.c"], check=True)
        return cls(trainer, library, scratch, threads)

    @cached_property
    def operations(self) -> Path:
        """The benchmark program of the kernels' operations, built with the trainer's profile."""
        options = ["--profile", PROFILES[self.trainer.parent.name], "--locked", "--no-run"]
        target = ["-p", "kernels", "--bench", "operations", "--message-format", "json-render-diagnostics"]
        built = subprocess.run(
            ["cargo", "bench", *target, *options], cwd=HERE, check=True, stdout=subprocess.PIPE, text=True
        )
        messages = [json.loads(line) for line in built.stdout.splitlines()]
        return next(Path(it["executable"]) for it in messages if it.get("target", {}).get("kind") == ["bench"])

    def step(self, contender: str, shape: str) -> Row:
        """Train; return the speed, the peak resident memory and, for ours, the time of each part of a step."""
        config = ["--config", str(HERE / f"{shape}.yaml"), "--steps", str(SHAPES[shape].steps)]
        if contender in OURS:
            overrides = [f"runtime.precision={OURS[contender]}", f"runtime.threads={self.threads}"]
            options = [word for override in overrides for word in ("--override", override)]
            command = [str(self.trainer), "bench", "--json", "--no-prediction", *config, *options]
        else:
            peer = [sys.executable, str(HERE / "peer.py"), "--threads", str(self.threads)]
            command = [*peer, *config, "--mode", PEERS[contender]]
        rows, peak = self.run(contender, command)
        measures: Row = {name: rows[-1][name] for name in ("tokens_per_second", "milliseconds") if name in rows[-1]}
        return {**measures, "peak_mebibytes": peak}

    def operation_rows(self, contender: str, shape: str, seconds: float) -> list[Row]:
        """Time the operations one by one, each for `seconds`. Our rows follow a row about the machine."""
        options = ["--config", HERE / f"{shape}.yaml", "--threads", self.threads, "--seconds", seconds]
        program = [self.operations] if contender == "ours" else [sys.executable, HERE / "operations.py"]
        rows, _ = self.run(contender, [str(word) for word in [*program, *options]])
        return rows

    def generation_rows(self, contender: str, shape: str) -> list[Row]:
        """Generate greedily with weights of every type."""
        models, tokens = self.scratch / f"models-{shape}", str(SHAPES[shape].tokens)
        if contender == "transformers":
            options = ["--config", HERE / f"{shape}.yaml", "--folder", models, "--threads", self.threads]
            program = [sys.executable, HERE / "generation.py", "--tokens", tokens]
            return self.run(contender, [str(word) for word in [*program, *options]])[0]
        rows: list[Row] = []
        for dtype in DTYPES.values():
            options = ["--prompt", "1", "--temperature", "0", "--max-tokens", tokens, "--device", "cpu", "--json"]
            generated, _ = self.run(
                contender, [str(self.trainer), "generate", "--checkpoint", str(models / dtype), *options]
            )
            rows.append({"dtype": dtype, "generated_per_second": generated[-1]["tokens_per_second"]})
        return rows

    def run(self, contender: str, command: list[str]) -> tuple[list[Row], int]:
        """Run a command; return the JSON lines that it prints, and its peak resident memory in mebibytes."""
        pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(pools, str(self.threads))}
        if contender.endswith(UNLOCKED):
            keeping = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
            environment |= {"LD_PRELOAD": str(self.mkl_unlock), **keeping}
        complaints = self.scratch / "stderr"
        with complaints.open("w") as stderr:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
            assert process.stdout
            lines = process.stdout.read().splitlines()
            # Not `wait`, which would not tell this one process's memory.
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{contender} ended with {process.returncode}: {' '.join(command)}\n{complaints.read_text()}")
        return [json.loads(line) for line in lines if line.startswith("{")], usage.ru_maxrss // 1024
