"""Checkpoints that landed versions wrote are verified, loaded and resumed by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from workspace import Workspace

STATE = "trainer_state.json"
GOLDEN = sorted((Path(__file__).parent / "golden" / "checkpoints").iterdir())
# Processors with other vector instructions round differently.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


@pytest.fixture(params=GOLDEN, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, workspace: Workspace) -> Path:
    """A copy of a golden run in the workspace, which is the folder that its config's paths are relative to."""
    folder: Path = request.param
    shutil.copytree(folder, workspace.root, dirs_exist_ok=True, symlinks=True)
    return workspace.root / "run"


def test_golden_checkpoint_is_intact_and_generates(workspace: Workspace, golden: Path) -> None:
    checkpoint = golden / "checkpoints" / "step-00000004"
    workspace.trainer("checkpoint", "verify", checkpoint).succeeded()
    words = ["--prompt", "the cat", "--max-tokens", "4", "--temperature", "0", "--json"]
    # Adapters, and the model that they belong to.
    if (workspace.root / "model").exists():
        words += ["--base-model", str(workspace.root / "model")]
    answer = workspace.trainer("generate", "--checkpoint", checkpoint, *words).succeeded()
    assert json.loads(answer.out)["prompt"] == "the cat"


def test_golden_run_resumes_with_its_data_and_losses(workspace: Workspace, golden: Path) -> None:
    units = json.loads((golden / "checkpoints" / "step-00000004" / STATE).read_text()).get("bf16_units")
    process = workspace.trainer("train", "--config", golden / "training.yaml", "--resume").succeeded()
    here = json.loads((golden / "environment.json").read_text())["bf16_units"]
    assert ("bf16 matmuls were computed with" in process.out) == (units not in (None, here))
    expected = json.loads((workspace.root / "expected.json").read_text())
    later_rows = [row for row in rows(golden / "ledger.jsonl") if row["kind"] == "step" and row["step"] > 4]
    assert later_rows == expected["ledger"]
    losses = {str(row["step"]): row["loss"] for row in rows(golden / "metrics.jsonl") if row["kind"] == "train"}
    precision = "bf16" if "precision: bf16" in (golden / "training.yaml").read_text() else "fp32"
    for step, loss in expected["losses"].items():
        assert losses[step] == pytest.approx(loss, rel=TOLERANCE[precision])
    assert sorted(losses, key=int) == [str(step) for step in range(1, 9)]
    workspace.trainer("validate-data", golden).succeeded()
    written_keys = keys(json.loads((golden / "checkpoints" / "step-00000008" / STATE).read_text()))
    covered = set().union(
        *(keys(json.loads(path.read_text())) for run in GOLDEN for path in run.rglob(f"step-*/{STATE}"))
    )
    assert written_keys <= covered, "a new key: check in checkpoints that hold it (tests/golden/make_checkpoints.py)"


def keys(document: Any, place: str = "") -> set[str]:
    """Return the paths of all keys in a JSON document; elements of an array count as one."""
    if isinstance(document, list):
        return set().union(*(keys(element, f"{place}[]") for element in document))
    if not isinstance(document, dict):
        return {place}
    return set().union(*(keys(value, f"{place}/{key}") for key, value in document.items()))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
