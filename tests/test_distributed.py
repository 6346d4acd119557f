"""Several processes without PyTorch: one sentence says what to install, before anything is written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from workspace import TINY_MODEL, Workspace

pytestmark = pytest.mark.skipif(find_spec("torch") is not None, reason="needs an environment without PyTorch")
INSTALL = "-m pip install 'torch>="


def test_several_processes_need_pytorch(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = (*TINY_MODEL, f"--input={text}", "--experiment=run", "--steps=4")
    workspace.orchestrate(*flags, "--nproc=2").refused(2, INSTALL)
    assert not workspace.run_folder("run").exists()
    workspace.orchestrate(*flags, "--launch=none").succeeded()
    config = workspace.run_folder("run") / "training.yaml"
    workspace.orchestrate("train", f"--config={config}", "--nproc=2").refused(2, INSTALL)
    workspace.extra_environment |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip
    rank = workspace.command(workspace.python, "-m", "orchestrator.distributed", f"--config={config}")
    rank.refused(2, INSTALL)


def test_a_plan_shares_the_optimizer_between_ranks(workspace: Workspace) -> None:
    plan = ("plan", "--preset=1b", "--gpu=rtx5090", "--override=data.batch_size=4")
    alone, shared = (workspace.orchestrate(*plan, *more).succeeded().out for more in ((), ("--ranks=4",)))
    assert "on each of 4 ranks" in shared
    assert "ranks" not in alone
    workspace.orchestrate(*plan, "--ranks=7").refused(2, "256 sequences cannot be shared equally by 7 ranks")
    workspace.orchestrate(*plan, "--ranks=128").refused(2, "64 micro-batches of 4, which 128 ranks cannot share")
