"""A run in trouble is told what holds it back: swapping, a slow disk and growing memory, injected into its process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_metrics import interrupt, read_until
from workspace import TINY_MODEL, TRAINER, Workspace

STAND_IN = Path(__file__).parent / "process_stand_in.c"


def stand_in(folder: Path) -> Path:
    """Compile what stands in for parts of the system, and return the library to preload."""
    library = folder / "stand_in.so"
    subprocess.run(["cc", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-o", library, STAND_IN, "-ldl"], check=True)
    return library


@pytest.mark.slow
def test_swap_a_slow_disk_and_growth_are_named(workspace: Workspace) -> None:
    """It takes over a minute, most of it asleep: growing memory cannot be told in less."""
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--experiment=held", "--launch=none").succeeded()
    library = stand_in(workspace.root)
    trouble = ["SWAPPED_KIB=131072", "FSYNC_SECONDS=0.1", "GROWTH_MIB=20", f"LD_PRELOAD={library}"]
    often = ["utilization_every=1s", "checkpoint.every_n_steps=1", "evaluation.every_n_steps=null"]
    overrides = [f"--override=runtime.{key}" for key in often] + ["--override=scheduler.total_steps=1000000"]
    config = workspace.run_folder("held") / "training.yaml"
    trainer = workspace.start("env", *trouble, TRAINER, "train", "--config", config, *overrides)
    advice_lines = [read_until(trainer, "advice: ") for _ in range(3)]
    interrupt(trainer)
    kinds = ["134.2 MB of this process are swapped out", "of the time is spent saving checkpoints", "keeps growing"]
    assert [line for kind in kinds for line in advice_lines if kind in line] == advice_lines
    assert [f"advice: {row['text']}\n" for row in workspace.metrics("held", "advice")] == advice_lines
    warnings = workspace.orchestrate("watch", "held", "--once").succeeded().out
    assert all(f"step {row['step']:,}: {row['text']}" in warnings for row in workspace.metrics("held", "advice"))
