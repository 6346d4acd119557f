"""`precision: fp8` as a user runs it: trained and resumed on a CPU, handed over in bf16, refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from workspace import TINY_MODEL, Workspace

TRAIN = [*TINY_MODEL, "--seq-len=64", "--device=cpu", "--seed=7"]
FILES = ("model.safetensors", "optimizer.safetensors")


def train(workspace: Workspace, experiment: str, precision: str, *words: str) -> Path:
    """Train on a text file; return the newest checkpoint."""
    if not (workspace.root / "book.txt").exists():
        workspace.write_text("book.txt")
    arguments = ["--input=book.txt", f"--experiment={experiment}", *TRAIN, f"--precision={precision}", *words]
    workspace.orchestrate(*arguments, "--steps=6").succeeded()
    return workspace.run_folder(experiment) / "checkpoints" / workspace.checkpoints(experiment)[-1]


def test_a_run_in_fp8_resumes_bitwise_and_is_handed_over_in_bf16(workspace: Workspace) -> None:
    straight = train(workspace, "straight", "fp8", "--checkpoint-every=3")
    copy = Path(shutil.copytree(workspace.run_folder("straight"), workspace.run_folder("copy"), symlinks=True))
    resumed = copy / "checkpoints" / straight.name
    shutil.rmtree(resumed)
    workspace.orchestrate("--resume=copy").succeeded()
    for name in FILES:
        assert (straight / name).read_bytes() == (resumed / name).read_bytes(), name
    assert workspace.losses("straight") == workspace.losses("copy")
    config = json.loads((straight / "config.json").read_text())
    assert (config.get("dtype") or config["torch_dtype"]) == "bfloat16"
    workspace.orchestrate("generate", "straight", "--prompt=def ", "--max-tokens=4").succeeded()
    loss = workspace.orchestrate("evaluate", "straight", "--json").succeeded()
    assert json.loads(loss.out)["loss"] > 0


def test_recipes_round_differently_and_stay_near_bf16(workspace: Workspace) -> None:
    batch = "--batch-size=4"  # more than 128 tokens: several blocks of each recipe
    train(workspace, "bf16", "bf16", batch)
    losses = [workspace.losses("bf16")]
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        train(workspace, recipe, "fp8", batch, f"--override=runtime.fp8_recipe={recipe}")
        losses.append(workspace.losses(recipe))
    assert len({tuple(values) for values in losses}) == 4, losses
    for values in losses[1:]:
        assert values == pytest.approx(losses[0], abs=0.05)


def plan(workspace: Workspace, gpu: str, preset: str, precision: str) -> dict[str, Any]:
    """Return the plan of a preset on a GPU that is not here."""
    words = ("plan", "--json", f"--preset={preset}", f"--gpu={gpu}", f"--override=runtime.precision={precision}")
    answer: dict[str, Any] = json.loads(workspace.orchestrate(*words).succeeded().out)
    return answer


def test_a_plan_knows_what_fp8_brings(workspace: Workspace) -> None:
    for gpu, least in (("rtx5090", 1.5), ("h100", 1.1)):
        bf16, fp8 = (plan(workspace, gpu, "1b", precision) for precision in ("bf16", "fp8"))
        faster = fp8["speed"]["tokens_per_second"][1] / bf16["speed"]["tokens_per_second"][1]
        assert faster > least, gpu
        categories = [{row["category"]: row["bytes"] for row in plan["bytes_by_category"]} for plan in (bf16, fp8)]
        # A byte for each of 0.9 G weights in the blocks, and their scales.
        assert 0.9e9 < categories[1]["weights"] - categories[0]["weights"] < 1.3e9
    narrow = ("plan", "--preset=25m", "--gpu=rtx4090", "--override=runtime.precision=fp8")
    assert "bf16 is faster at these widths" in workspace.orchestrate(*narrow).succeeded().out
    refused = workspace.orchestrate("plan", "--preset=1b", "--gpu=a100-80", "--override=runtime.precision=fp8")
    refused.refused(2, "a100-80", "no fp8 matmuls", "--precision bf16")


def test_what_does_not_go_together_is_refused(workspace: Workspace) -> None:
    workspace.write_text("book.txt")
    command = ["--input=book.txt", "--experiment=e", *TRAIN, "--steps=6"]
    recipe = workspace.orchestrate(*command, "--override=runtime.fp8_recipe=blockwise")
    recipe.refused(2, "runtime.fp8_recipe", "runtime.precision: fp8")
    train(workspace, "e", "fp8")
    workspace.orchestrate("--resume=e", "--precision=bf16").refused(2, "precision")
