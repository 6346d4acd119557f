"""Process, bindings and Python API are one trainer: the same config and seed give the same losses, bit for bit."""

from __future__ import annotations

import shutil

import pytest
from workspace import TINY_MODEL, Workspace

API = """
import sys
from orchestrator import RunConfig, Trainer
trainer = Trainer(RunConfig.load(sys.argv[1]))
for report in trainer:
    print(report.step, report.loss)
trainer.save()
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_ways_in_give_bitwise_the_same_losses(workspace: Workspace, precision: str) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=8", f"--precision={precision}"]
    for launch in ("process", "bindings"):
        workspace.orchestrate(*flags, f"--launch={launch}", f"--experiment={launch}").succeeded()
    workspace.orchestrate(*flags, "--launch=none", "--experiment=api").succeeded()
    config = workspace.run_folder("api") / "training.yaml"
    api = workspace.command(workspace.python, "-c", API, config).succeeded()
    process = workspace.losses("process")
    assert len(process) == 8
    assert workspace.losses("bindings") == process
    assert workspace.losses("api") == process
    assert [float(line.split()[1]) for line in api.out.splitlines()] == process


def test_threads_change_nothing(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=6", "--launch=none", "--experiment=one").succeeded()
    weights = set()
    for threads in (1, 2, 4):
        run = workspace.run_folder(f"threads{threads}")
        shutil.copytree(workspace.run_folder("one"), run)
        override = ("--override", f"runtime.threads={threads}")
        workspace.trainer("train", "--config", run / "training.yaml", *override).succeeded()
        weights.add((run / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes())
    assert len(weights) == 1
