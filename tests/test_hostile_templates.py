"""A chat template cannot crash, hang or fill the memory: it is refused, or the row that it fails on is skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_finetune import TEMPLATE, pretrained, write_rows
from test_finetune_messages import tuned
from workspace import Workspace

__all__ = ["pretrained"]

ITSELF = "{% set n = namespace() %}{% set n.a = [n] %}{{ n|tojson }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested": ("{{ " + "[" * 99_999 + "]" * 99_999 + " }}", "it nests more than 24 brackets (line"),
    "chained": ("{{ 1" + " + 1" * 100_000 + " }}", "an expression of more than 400 operators"),
    "elifs": ("{% if 0 %}" + "{% elif 0 %}" * 50_000 + "{% endif %}", "more than 200 `elif`s"),
    "itself": (ITSELF, "it sets an attribute of a namespace to a namespace"),
    "loops": (LOOP, "computes or writes far more than a conversation of this size needs"),
    "indents": ("{{ messages|tojson(indent=10**11) }}", "`tojson` is to indent by 100000000000"),
}


@pytest.fixture
def rows(workspace: Workspace) -> Path:
    return write_rows(workspace.root / "rows.jsonl")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused_by_every_command(
    workspace: Workspace, pretrained: Path, rows: Path, kind: str
) -> None:
    source, message = HOSTILE[kind]
    template = workspace.root / "hostile.jinja"
    template.write_text(TEMPLATE + source)
    flag = f"--chat-template={template}"
    words = ("the chat template", "cannot be used: ", message)
    tuned(workspace, pretrained, rows, "refused", flag).refused(2, *words)
    workspace.orchestrate("chat", pretrained, "--once=hi", flag).refused(2, *words)


def test_rows_that_a_template_cannot_finish_are_counted(workspace: Workspace, pretrained: Path) -> None:
    template = workspace.root / "some.jinja"
    template.write_text(f"{TEMPLATE}{{% if 'LOOP' in messages[0].content %}}{LOOP}{{% endif %}}")
    rows = workspace.root / "rows.jsonl"
    answer = {"role": "assistant", "content": "A river of text."}
    texts = ["LOOP" if number % 10 == 0 else f"number {number}" for number in range(60)]
    conversations = [{"messages": [{"role": "user", "content": text}, answer]} for text in texts]
    rows.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    process = tuned(workspace, pretrained, rows, "some", f"--chat-template={template}", "--steps=20").succeeded()
    assert "refused by the chat template" in process.out + process.err
    assert "computes or writes far more" in process.out + process.err
    with_loop = workspace.orchestrate("chat", "some", "--once=LOOP")
    with_loop.refused(2, "the chat template", "computes or writes far more")
    workspace.orchestrate("chat", "some", "--once=hi", "--max-tokens=2").succeeded()
