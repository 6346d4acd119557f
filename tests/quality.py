"""A quality bench in miniature: its text is a few modules, its models train in seconds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import run
from fake_hub.fineweb import documents
from rows import Row
from workspace import TRAINER

TINY = Row(
    "tiny", "10m",
    (
        "model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=1", "model.num_attention_heads=2",
        "data.sequence_length=32", "data.sequences_per_step=4", "data.batch_size=2", "scheduler.total_steps=6",
        "scheduler.warmup_steps=1", "runtime.evaluation.every_n_steps=2", "runtime.checkpoint.every_n_steps=2",
        "runtime.evaluation.max_batches=4",
    ),
    seed=1,
)  # fmt: skip


def small_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> run.Bench:
    """Return a bench on 300 small modules."""
    package = folder / "packages" / "sympy"
    package.mkdir(parents=True)
    for index, content in enumerate(list(documents())[:300]):
        (package / f"module{index}.py").write_text(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder / "packages"))
    monkeypatch.setattr(run, "VOCABULARY", 384)
    return run.Bench(folder / "bench", TRAINER, folder / "results")
