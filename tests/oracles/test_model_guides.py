"""The commands of the guides on models work as typed, on a small model of transformers and a Hub on loopback."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, write_fineweb
from fake_hub.fineweb import documents
from llama_cpp_server import llama_cpp
from tiny_models import make_model, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from workspace import REPOSITORY, Finished, Workspace

GUIDES = REPOSITORY / "docs/guide"
MODEL, DATASET = "HuggingFaceTB/SmolLM2-135M", "HuggingFaceFW/fineweb-edu"
SMALL = (
    "--preset=smoke_cpu --seq-len=32 --batch-size=2 --grad-accum=2 --steps=4 --checkpoint-every=2 --evaluate-every=2 "
    "--eval-batches=2 --device=cpu"
).split()
SMALL_CONFIG = {
    "data.sequence_length": 32, "data.sequences_per_step": 4, "scheduler.total_steps": 2, "scheduler.warmup_steps": 1,
    "runtime.device": "cpu", "runtime.evaluation.max_batches": 2, "data.held_out_fraction": 0.1,
}  # fmt: skip
STEP = "step-00000004"
ELSEWHERE = ("hf auth login", "pip install", "vllm serve", "llama-cli", "MODEL=")
"""The beginnings of commands of other programs and of the shell."""


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / guide).read_text(encoding="utf-8"), re.DOTALL)


def commands(guide: str) -> list[list[str]]:
    """Return the commands of the guide that are ours, as words."""
    lines = [line for block in blocks(guide, "sh") for line in block.splitlines()]
    command_lines = [shlex.split(line, comments=True) for line in lines if not line.startswith(ELSEWHERE)]
    assert all(words[0] == "orchestrate" for words in command_lines)
    return [words[1:] for words in command_lines]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """The guide's model and data set in small, on a Hub whose token is that of `alice`."""
    root = tmp_path / "hub"
    write_fineweb(root)
    (root / "datasets" / "HuggingFaceFW/fineweb").rename(root / "datasets" / DATASET)
    folder = make_model("smollm_2", root / "models" / MODEL)
    write_tokenizer("smollm_2", list(documents())[:300], folder)
    with FakeHub(root, token="hf_abcdefghijklmnopqrstuvwxyz01234567") as hub:
        yield hub


@pytest.fixture
def workspace(tmp_path: Path, hub: FakeHub) -> Workspace:
    (tmp_path / "work").mkdir()
    return Workspace(tmp_path / "work", hub.environment(tmp_path / "hf"))


def orchestrate(workspace: Workspace, *words: str | Path) -> Finished:
    """Run `orchestrate` of this environment, which has `[export]`."""
    return workspace.command(workspace.python, "-m", "orchestrator", *words)


def test_a_run_starts_from_a_repository_and_from_a_folder(workspace: Workspace, hub: FakeHub) -> None:
    (command,) = commands("pretrained-models.md")
    out = orchestrate(workspace, *command, *SMALL).succeeded().out
    assert "training starts from the weights in" in out
    resolved_config = json.loads((workspace.run_folder("more") / "resolved_config.json").read_text())
    assert "models--HuggingFaceTB--SmolLM2-135M/snapshots/" in resolved_config["model"]["init_from"]
    assert (resolved_config["optimizer"]["algorithm"], resolved_config["optimizer"]["learning_rate"]) == ("adamw", 5e-5)
    assert [row["step"] for row in workspace.metrics("more", "evaluation")] == [0, 2, 4]


@pytest.mark.parametrize("number", [0, 1], ids=["all weights", "adapters"])
def test_the_configs_train(workspace: Workspace, hub: FakeHub, number: int) -> None:
    config = blocks("pretrained-models.md", "yaml")[number]
    shards = hub.root / "datasets" / DATASET / "data/CC-MAIN-2013-20"
    path = workspace.root / "run" / "training.yaml"
    path.parent.mkdir()
    path.write_text(
        re.sub(r"/models/[\w.-]+", str(hub.root / "models" / MODEL), config).replace(
            "corpus/*.parquet", f"{shards}/*.parquet"
        )
    )
    flags = [f"--override={key}={value}" for key, value in SMALL_CONFIG.items()]
    workspace.trainer("train", "--config", path, *flags).succeeded()
    first = json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["kind"], first["step"]) == ("evaluation", 0)


def test_a_model_is_used_elsewhere(workspace: Workspace, hub: FakeHub) -> None:
    (start,) = commands("pretrained-models.md")
    orchestrate(workspace, *start, *SMALL, "--experiment=E").succeeded()
    for words in commands("use-your-model.md"):
        orchestrate(workspace, *(word.replace("step-00001000", STEP) for word in words)).succeeded()
    examples = blocks("use-your-model.md", "python")
    for example in examples:
        workspace.command(workspace.python, "-c", example.replace("step-00001000", STEP)).succeeded()
    checkpoint = workspace.run_folder("E") / "checkpoints" / STEP
    for folder in (workspace.root / "E-hf", workspace.root / "first", hub.root / "models/alice/my-model"):
        AutoModelForCausalLM.from_pretrained(folder)
        assert (folder / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode("Once upon a time").ids
    with llama_cpp(workspace.root / "E-q8_0.gguf") as server:
        assert server.tokenize("Once upon a time", add_special=True) == ids
        assert len(server.complete(ids, 8, 1)["tokens"]) == 8
