"""A user's folder in miniature: runs the programs there and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_hub.fineweb import documents

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
TRAINER = TARGET / "debug" / "transformer-candle"
_BESIDE = Path(sys.executable).parent / "orchestrate"
# The oracles run in an environment of their own and call the programs of the development one.
ORCHESTRATE = _BESIDE if _BESIDE.exists() else REPOSITORY / ".venv" / "bin" / "orchestrate"

TINY_MODEL = (
    "--preset=smoke_cpu --hidden-size=32 --intermediate-size=64 --layers=2 --heads=4 --kv-heads=2 --seq-len=32 "
    "--batch-size=2 --grad-accum=2 --vocab-size=384 --learning-rate=3e-3 --warmup-steps=2 --log-every=1 "
    "--shuffle-buffer=64 --eval-batches=2 --device=cpu --seed=7"
).split()
TINY_CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        max_position_embeddings: 64}
data: {sequence_length: 32, batch_size: 2, gradient_accumulation_steps: 2, shuffle_buffer_size: 64}
optimizer: {learning_rate: 3.0e-3}
scheduler: {strategy: cosine, warmup_steps: 2, total_steps: 6}
runtime: {device: cpu, seed: 7, log_every_n_steps: 1, checkpoint: {every_n_steps: 3},
          evaluation: {every_n_steps: 3, max_batches: 2}}
"""


@dataclass(frozen=True)
class Finished:
    """A program that ended: exit code and what it printed."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Finished:
        assert self.code == 0, f"exit code {self.code}\n{self.out[-1500:]}\n{self.err[-3000:]}"
        return self

    def refused(self, code: int, *words: str) -> Finished:
        """Check that it ended with `code` and one clear paragraph that holds all `words`."""
        assert self.code == code, f"exit code {self.code}\n{self.out[-1500:]}\n{self.err[-3000:]}"
        assert "Traceback" not in self.err, self.err
        assert "panicked" not in self.err, self.err
        for word in words:
            assert word in self.err, f"{word!r} is not in:\n{self.err}"
        return self


@dataclass
class Workspace:
    """A folder `root` that programs are run in, so that ./runs and ./artifacts lie inside it."""

    root: Path
    extra_environment: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The caller's environment, less what would point outside, with this folder's cache."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "ORCHESTRATE_"))}
        own = {
            "ORCHESTRATE_CACHE_ROOT": str(self.root / "cache"),
            "CARGO_TARGET_DIR": str(TARGET),
            "PATH": f"{ORCHESTRATE.parent}{os.pathsep}{keep.get('PATH', '')}",
        }
        return keep | own | self.extra_environment

    def command(self, *command: str | Path, folder: Path | None = None, timeout: float = 300) -> Finished:
        process = subprocess.run(
            [str(word) for word in command], cwd=folder or self.root, env=self.environment, text=True,
            capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Finished(process.returncode, process.stdout, process.stderr)

    def orchestrate(self, *arguments: str | Path, timeout: float = 300) -> Finished:
        return self.command(ORCHESTRATE, *arguments, timeout=timeout)

    def trainer(self, *arguments: str | Path, timeout: float = 300) -> Finished:
        return self.command(TRAINER, *arguments, timeout=timeout)

    def start(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a program as a terminal would: in a process group of its own."""
        return subprocess.Popen(
            [str(word) for word in command], cwd=self.root, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    @property
    def python(self) -> str:
        """The interpreter that the package is installed for."""
        return sys.executable

    def run_folder(self, experiment: str) -> Path:
        return self.root / "runs" / experiment

    def metrics(self, experiment: str, kind: str = "train") -> list[dict[str, Any]]:
        lines = (self.run_folder(experiment) / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def losses(self, experiment: str) -> list[float]:
        return [row["loss"] for row in self.metrics(experiment)]

    def checkpoints(self, experiment: str) -> list[str]:
        folders = (self.run_folder(experiment) / "checkpoints").glob("step-*")
        return sorted(path.name for path in folders)

    def write_text(self, name: str = "book.txt", characters: int = 120_000) -> Path:
        """Write a text file of Python sources below the root; return its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ""
        for document in documents():
            text += document + "\n\n"
            if len(text) > characters:
                break
        path.write_text(text, encoding="utf-8")
        return path
