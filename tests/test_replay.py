"""`validate-data --replay` shows the rows and the text of a step's batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_finetune import SMALL, pretrained, write_rows
from workspace import TINY_MODEL, Workspace

__all__ = ["pretrained"]

ROWS, GROUP = 120, 30
FLAGS = [
    *TINY_MODEL, "--shuffle-buffer=16", "--schedule=constant",
    "--override=scheduler.total_steps=null", "--override=scheduler.total_epochs=1",
]  # fmt: skip


def text_of(row: int) -> str:
    return f"(row {row}) " + f"word{row} " * (row % 7)


def write(folder: Path, kind: str) -> Path:
    texts = [text_of(row) for row in range(ROWS)]
    if kind == "parquet":
        path = folder / "text.parquet"
        pq.write_table(pa.table({"text": texts}), path, row_group_size=GROUP)
    else:
        path = folder / "text.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_is_shown_with_its_text(workspace: Workspace, kind: str) -> None:
    path = write(workspace.root, kind)
    workspace.orchestrate(*FLAGS, f"--input={path}", "--experiment=run").succeeded()
    steps = [row["step"] for row in workspace.metrics("run")]
    replay = [f"--replay={step}" for step in steps]
    report = json.loads(workspace.orchestrate("validate-data", "run", *replay, "--json").succeeded().out)
    assert [batch["step"] for batch in report["batches"]] == steps == report["replayed"]
    all_numbers: set[int] = set()
    for sequence in (sequence for batch in report["batches"] for sequence in batch["sequences"]):
        numbers = [numbered(row, path, kind) for row in sequence["rows"]]
        shown_rows = [int(row) for row in re.findall(r"\(row (\d+)\)", sequence["text"])]
        # The first row may have begun in another sequence, and the last one may end in the next.
        assert any(shown_rows == numbers[first:last] for first in (0, 1) for last in (None, -1)), sequence
        all_numbers |= set(numbers)
    assert len(all_numbers) == report["components"][0]["epochs"][0]["documents"] > ROWS / 2


def numbered(row: dict[str, Any], path: Path, kind: str) -> int:
    assert row["file"] == path.name
    return int(row["row_group"] * (GROUP if kind == "parquet" else 0) + row["row"])


def test_conversations_are_shown_with_their_rows(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = ["--experiment=chat", *SMALL, "--input", str(rows), "--steps=2"]
    workspace.orchestrate("finetune", "--model", pretrained, *flags).succeeded()
    report = json.loads(workspace.orchestrate("validate-data", "chat", "--replay=2", "--json").succeeded().out)
    (batch,) = report["batches"]
    for sequence in batch["sequences"]:
        question_numbers = [int(number) for number in re.findall(r"What is (\d+)\?", sequence["text"])]
        assert question_numbers == [row["row"] for row in sequence["rows"]]


def test_a_replayed_step_fits_a_terminal(workspace: Workspace) -> None:
    path = write(workspace.root, "jsonl")
    workspace.orchestrate(*FLAGS, f"--input={path}", "--experiment=run").succeeded()
    for program in (workspace.orchestrate, workspace.trainer):
        output = program("validate-data", "run", "--replay=2").succeeded().out
        assert "step 2: its batch was rebuilt and is identical" in output
        assert re.search(r"sequence 1 of 4\n +text\.jsonl, row group 0, rows? \d+", output), output
        assert re.search(r"^ +\| .*word", output, re.MULTILINE), output
        assert max(map(len, output.splitlines())) <= 80
