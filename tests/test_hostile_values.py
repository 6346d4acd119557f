"""Absurd values in files that people and other programs write end in a sentence, never in a traceback or a panic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from workspace import REPOSITORY, Finished, Workspace

GOLDEN = REPOSITORY / "tests/golden/checkpoints/first_bf16_mixture/run"
STEP = "step-00000004"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def model(workspace: Workspace) -> Path:
    """A model directory that is no checkpoint."""
    folder = workspace.root / "model"
    shutil.copytree(GOLDEN / "checkpoints" / STEP, folder, ignore=shutil.ignore_patterns("*state*", "MANIFEST*"))
    return folder


def check_refusal(process: Finished, *words: str, code: int = 2) -> None:
    """Check that a command was refused in one sentence."""
    process.refused(code, *words)
    assert not any(word in process.err for word in ("a bug", "Traceback", "panicked", "internal error")), process.err


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        ("{low: 1e-4, high: 1e-2, step: .nan}", "nan is not a finite number"),
        ("{low: -.inf, high: 1e-2}", "-inf is not a finite number"),
        ("[1e-3, .nan]", "nan is not a finite number"),
        (DEEP, "it nests too deeply"),
    ],
    ids=["step", "low", "choice", "deep"],
)
def test_bad_search_spaces_are_refused(workspace: Workspace, declaration: str, words: str) -> None:
    space = workspace.root / "space.yaml"
    space.write_text(f"parameters:\n  optimizer.learning_rate: {declaration}\n")
    check_refusal(workspace.orchestrate("tune", space, REPOSITORY / "configs/smoke_cpu.yaml"), "space.yaml", words)


def test_bad_sizes_of_shards_are_refused(workspace: Workspace, model: Path) -> None:
    for size in ("9" * 400, "9" * 400 + "GB", "1e999GB"):
        check_refusal(
            workspace.orchestrate("export", model, "--format=hf", f"--max-shard-size={size}"), "--max-shard-size"
        )
    assert not (workspace.root / "model-hf").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 2**63}, "`r` is 9223372036854775808"),
        ({"r": 0}, "`r` is 0"),
        ({"lora_alpha": 1e40}, "`lora_alpha` is 1e40"),
        (None, "nest"),
    ],
    ids=["rank", "no rank", "scale", "deep"],
)
def test_bad_adapter_configs_are_refused(
    workspace: Workspace, model: Path, change: dict[str, Any] | None, words: str
) -> None:
    adapters = workspace.root / "adapters"
    adapters.mkdir()
    (adapters / "adapter_model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    text = (
        f'{{"a": {DEEP}}}' if change is None else json.dumps({**usual, "base_model_name_or_path": str(model), **change})
    )
    (adapters / "adapter_config.json").write_text(text)
    check_refusal(workspace.orchestrate("export", adapters, "--format=hf", "--merge"), "adapter_config.json", words)
    process = workspace.trainer("generate", adapters, "--prompt=a")
    check_refusal(process, "adapter_config.json", code=5 if change is None else 2)


def test_a_template_that_renders_nothing_is_refused(workspace: Workspace, model: Path) -> None:
    (workspace.root / "empty.jinja").write_text('{{ "" }}')
    check_refusal(
        workspace.orchestrate("chat", model, "--once=hi", "--chat-template=empty.jinja"), "makes an empty text"
    )


def test_a_run_without_a_finite_loss_is_exported(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN, workspace.run_folder("E"))
    metrics = workspace.run_folder("E") / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | ({"loss": None} if "loss" in row else {})) + "\n" for row in rows))
    workspace.orchestrate("export", "E", "--format=hf").succeeded()
    assert "## Evaluation" not in (workspace.root / "E-hf/README.md").read_text()


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_absurd_figures_give_short_valid_output(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN, workspace.run_folder("E"))
    step = 2**64 - 1
    train = {"kind": "train", "step": step, "loss": 1e308, "tokens": step, "step_seconds": 1e308, "memory_bytes": step}
    lines = [json.dumps(train | {"tokens_per_second": 1e308, "data_wait_seconds": 1e308})] * 3
    lines += ['{"kind":"train","step":5,"loss":1e999,"step_seconds":Infinity,"tokens_per_second":-Infinity}']
    lines += [json.dumps({"kind": "sample", "step": step, "prompt": "a", "text": "x" * 15_000_000})]
    with (workspace.run_folder("E") / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    for command in (["watch", "E", "--once"], ["watch", "E", "--once", "--json"], ["runs"], ["runs", "--json"]):
        out = workspace.orchestrate(*command).succeeded().out
        assert len(out) < 20_000
        if "--json" in command:
            json.loads(out, parse_constant=not_json)
