"""The commands of the guide on fine-tuning work as typed, on a small model of transformers and a Hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, Repository
from fake_hub.fineweb import documents
from llama_cpp_server import llama_cpp
from peft import PeftModel
from test_model_guides import commands, orchestrate
from tiny_models import make_model, write_tokenizer
from transformers import AutoModelForCausalLM
from workspace import Workspace

MODEL, DATASET = "meta-llama/Llama-3.1-8B-Instruct", "trl-lib/Capybara"
SMALL = "--seq-len=64 --batch-size=2 --grad-accum=2 --steps=4 --device=cpu".split()
TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def rows(count: int) -> str:
    turns = [[("user", f"What is {index}?"), ("assistant", f"It is {index}.")] for index in range(count)]
    lines = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """The guide's model and data set in small, on a Hub whose token is that of `alice`."""
    root = tmp_path / "hub"
    data = Repository(root, "datasets", DATASET).folder
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(rows(60))
    folder = make_model("llama_3", root / "models" / MODEL, head_dim=32)
    write_tokenizer("llama_3", list(documents())[:300], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with FakeHub(root, token="hf_abcdefghijklmnopqrstuvwxyz01234567") as hub:
        yield hub


def test_the_commands_of_the_guide_work(tmp_path: Path, hub: FakeHub) -> None:
    (tmp_path / "work").mkdir()
    workspace = Workspace(tmp_path / "work", hub.environment(tmp_path / "hf"))
    (workspace.root / "conversations.jsonl").write_text(rows(40))
    outputs: dict[str, str] = {}
    guide_commands = [
        [{"$MODEL": MODEL, "$DATA": DATASET}.get(word, word) for word in words] for words in commands("fine-tuning.md")
    ]
    for words in guide_commands:
        small = SMALL if words[0] == "finetune" else ["--device=cpu", "--max-tokens=8"] if words[0] == "chat" else []
        outputs[" ".join(words)] = orchestrate(workspace, *words, *small).succeeded().out
    assert {words[0] for words in guide_commands} == {"finetune", "plan", "chat", "export", "push"}
    (answer,) = (text for words, text in outputs.items() if "--once" in words)
    assert answer.endswith("\n")
    (listing,) = (text for words, text in outputs.items() if "--list" in words)
    assert f"step-00000004  4     16    {workspace.metrics('capybara', 'evaluation')[-1]['loss']:.4f}" in listing
    (unstable,) = (text for words, text in outputs.items() if "--unstable" in words)
    assert "optimizer.learning_rate: 0.0001 (was 0.0002)" in unstable
    assert [row["step"] for row in workspace.metrics("capybara")] == [1, 2, 3, 4]
    assert workspace.metrics("third", "evaluation")[0]["step"] == 0
    base = AutoModelForCausalLM.from_pretrained(hub.root / "models" / MODEL)
    PeftModel.from_pretrained(base, workspace.root / "capybara-adapter")
    AutoModelForCausalLM.from_pretrained(workspace.root / "capybara-hf")
    with llama_cpp(workspace.root / "capybara-q8_0.gguf") as server:
        assert len(server.complete([5, 6, 7], 8, 1)["tokens"]) == 8
    assert (hub.root / "models/alice/capybara/adapter_config.json").exists()
