"""Training on one's own files: every format, as file, folder or glob."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fake_hub.fineweb import documents
from workspace import TINY_MODEL, Workspace

QUICK = [*TINY_MODEL, "--steps=3", "--evaluate-every=3", "--experiment=local"]


def some_documents(count: int = 160) -> list[str]:
    all_documents = documents()
    return [next(all_documents) for _ in range(count)]


def json_lines(column: str = "text") -> bytes:
    return "".join(json.dumps({column: text, "n": 1}) + "\n" for text in some_documents()).encode()


def write(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-0.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": some_documents()}), path, row_group_size=30, compression="zstd")
    elif kind == "jsonl":
        path.write_bytes(json_lines())
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(json_lines()))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(json_lines()))
    else:
        path.write_text("\n\n".join(some_documents()))
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt"])
def test_every_format_trains_and_evaluates(workspace: Workspace, kind: str) -> None:
    path = write(workspace.root / "text", kind)
    workspace.orchestrate(*QUICK, "--input", path).succeeded()
    assert len(workspace.losses("local")) == 3
    assert workspace.metrics("local", "evaluation")[0]["bits_per_byte"] > 0


def test_folders_globs_and_an_own_validation_set_are_read(workspace: Workspace) -> None:
    for kind in ("parquet", "jsonl.gz", "txt"):
        write(workspace.root / "text", kind)
    validation = write(workspace.root / "held", "jsonl")
    workspace.orchestrate(
        *QUICK, "--input", workspace.root / "text", "--input", "text/*.jsonl.gz", "--validation", validation
    ).succeeded()
    assert workspace.metrics("local", "evaluation")


def test_a_column_of_another_name_is_found_or_named(workspace: Workspace) -> None:
    path = workspace.root / "content.jsonl"
    path.write_bytes(json_lines("content"))
    workspace.orchestrate(*QUICK, "--input", path).refused(3, "content.jsonl", "text")
    workspace.orchestrate(*QUICK, "--input", path, "--text-column=content").succeeded()


def test_data_that_cannot_be_read_ends_with_3_and_its_name(workspace: Workspace) -> None:
    broken = workspace.root / "broken.parquet"
    broken.write_bytes(b"PAR1 this is not Parquet PAR1")
    workspace.orchestrate(*QUICK, "--input", broken).refused(3, "broken.parquet")
    workspace.orchestrate(*QUICK, "--input", workspace.root / "nowhere").refused(3, "nowhere")
    empty = workspace.root / "empty.txt"
    empty.write_text("")
    workspace.orchestrate(*QUICK, "--input", empty).refused(3, "empty.txt")
