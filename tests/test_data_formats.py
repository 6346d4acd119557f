"""Files as other programs write them: what is read of them, what is passed over, and what is said."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from orchestrator import _native
from workspace import TINY_MODEL, Workspace

WORDS = ("NaN", "-Infinity", 'a "quote"', "back\\slash", "[", "}", "\u00e9\u4e2d", "Infinity,")


def texts(
    *patterns: Path, column: str = "text", reading_version: int | None = None, split: str | None = None
) -> list[str]:
    source = _native.DataSource.local([str(pattern) for pattern in patterns], column, reading_version, split)
    return list(source.documents())


def test_json_is_read_as_python_and_arrow_read_it(tmp_path: Path) -> None:
    numbers = (math.nan, math.inf, -math.inf, 1.5, None)
    generator = random.Random(0)
    rows: list[dict[str, object]] = [
        {
            "score": generator.choice(numbers),
            "text": f"{number} {generator.choice(WORDS)}",
            "nested": {"numbers": [generator.choice(numbers)], "word": generator.choice(WORDS)},
        }
        for number in range(200)
    ]
    lines = [json.dumps(row, ensure_ascii=bool(number % 2)) for number, row in enumerate(rows)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arrow = [row["text"] for row in pyarrow.json.read_json(path).select(["text"]).to_pylist()]
    assert texts(path) == [json.loads(line)["text"] for line in lines] == arrow


@pytest.mark.parametrize("indent", [None, 2])
def test_json_arrays_are_rows(tmp_path: Path, indent: int | None) -> None:
    rows = [{"text": f"{number} {WORDS[number % len(WORDS)]}", "id": number} for number in range(600)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=indent).encode()))
    expected = [row["text"] for row in rows]
    assert texts(tmp_path / "a.json") == texts(tmp_path / "b.json.gz") == expected


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_strings_of_every_physical_type_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["one", None, "two", "two"], pa.string()).cast(kind)
    nested = pa.StructArray.from_arrays([column], ["t"])
    pq.write_table(pa.table({"text": column, "of": nested}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == texts(tmp_path / "a.parquet", column="of.t") == ["one", "two", "two"]


def test_a_column_of_type_null_has_rows_without_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.nulls(5)}), tmp_path / "b.parquet")
    assert texts(tmp_path) == ["one", "two"]
    with pytest.raises(_native.DataError, match="5 without text"):
        texts(tmp_path / "b.parquet")


def test_gzip_is_read_as_python_reads_it(tmp_path: Path) -> None:
    member = gzip.compress(b'{"text": "one"}\n')
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(member + bytes(1000) + member + bytes(3))
    with gzip.open(path) as file:
        assert [json.loads(line)["text"] for line in file] == texts(path) == ["one", "one"]


def test_separators_divide_texts_and_are_counted(workspace: Workspace) -> None:
    documents = [f"story {number}\nof {number * 7} words" for number in range(400)]
    path = workspace.root / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    assert texts(path) == documents
    assert len(texts(path, reading_version=1)) == 1
    process = workspace.orchestrate(*TINY_MODEL, "--input", path, "--steps=3").succeeded()
    assert "<|endoftext|> separates the documents of a.txt (399 of them)" in process.out + process.err


def downloaded(root: Path) -> Path:
    """A data set as `hf download --local-dir` leaves it, with files that are no data."""
    folder = root / "texts"
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train", 300), ("validation", 40), ("test", 30)):
        table = pa.table({"text": [f"{split} {number} and some more words" for number in range(rows)]})
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet", row_group_size=50)
    (folder / "LICENSE.txt").write_text("Permission is hereby granted")
    (folder / "dataset_infos.json").write_text('{"default": {}}')
    (folder / "rows.csv").write_text("text\nx\n")
    return folder


def test_a_downloaded_folder_is_read_as_on_the_hub(workspace: Workspace) -> None:
    folder = downloaded(workspace.root)
    source = _native.DataSource.local([str(folder)])
    assert (source.files, len(list(source.documents()))) == (1, 300)
    assert "train (1 file) is read, not validation (1 file), test (1 file)" in source.notes[1]
    assert "3 files are passed over" in source.notes[0] and "1 .csv (convert" in source.notes[0]
    assert len(texts(folder, split="test")) == 30
    assert _native.DataSource.local([str(folder)], reading_version=1).files == 5
    with pytest.raises(_native.DataError, match="no split `dev`: choose one of train, validation, test"):
        texts(folder, split="dev")
    with pytest.raises(_native.TrainerError, match="--split"):
        texts(folder / "data" / "train-00000-of-00001.parquet", split="train")


def test_split_and_max_samples_are_kept_by_the_run(workspace: Workspace) -> None:
    folder = downloaded(workspace.root)
    flags = (*TINY_MODEL, f"--input={folder}", "--steps=3", "--experiment=x")
    process = workspace.orchestrate(*flags, "--split=validation", "--max-samples=20", "--vocab-size=300").succeeded()
    assert "20 documents" in process.out or "19 documents" in process.out
    config = (workspace.run_folder("x") / "training.yaml").read_text()
    assert "split: validation" in config and "max_samples: 20" in config
    resumed_run = workspace.orchestrate(*flags, "--vocab-size=300", "--resume=latest", "--split=test")
    resumed_run.refused(2, "--split")


def test_sources_are_read_where_a_pattern_names_them(tmp_path: Path) -> None:
    (tmp_path / "odd [1]" / "src").mkdir(parents=True)
    (tmp_path / "odd [1]" / "src" / "a.py").write_text("print(1)\n")
    (tmp_path / "odd [1]" / "a.txt").write_text("text")
    assert texts(tmp_path / "odd [1]" / "**" / "*.py") == ["print(1)\n"]
    source = _native.DataSource.local([str(tmp_path / "odd [1]")])
    assert source.files == 1 and "1 .py (name them in a pattern" in source.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        ("a.txt", "some text".encode("utf-16"), "UTF-16 text"),
        ("a.txt", b"caf\xe9\n" * 50, "iconv -f WINDOWS-1252"),
        ("a.json", json.dumps({"data": [{"text": "a"}]}, indent=1).encode(), "JSON object over several lines"),
        ("a.jsonl", b'{"text": 1}\n{"text": 2}\n', "holds numbers"),
    ],
)
def test_files_that_cannot_be_used_are_named(workspace: Workspace, name: str, content: bytes, sentence: str) -> None:
    path = workspace.root / name
    path.write_bytes(content)
    workspace.orchestrate(*TINY_MODEL, "--input", path, "--steps=3").refused(3, name, sentence)


def test_folders_of_other_formats_say_the_way_out(workspace: Workspace) -> None:
    folder = workspace.root / "saved"
    folder.mkdir()
    (folder / "data-00000-of-00001.arrow").write_bytes(b"\xff" * 100)
    (folder / "state.json").write_text("{}")
    workspace.orchestrate(*TINY_MODEL, "--input", folder).refused(3, "save_to_disk", "load_from_disk")
    workspace.orchestrate(*TINY_MODEL, "--input", "~/no texts").refused(3, str(Path.home() / "no texts"))


def test_text_after_many_nulls_is_held_out(workspace: Workspace) -> None:
    rows: list[dict[str, object]] = [{"text": None, "id": number} for number in range(20_000)]
    rows += [{"text": f"some text of {number} and {number * number}", "id": number} for number in range(300)]
    path = workspace.root / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = workspace.orchestrate(*TINY_MODEL, "--input", path, "--steps=3", "--evaluate-every=3").succeeded()
    assert "nothing is evaluated" not in process.out + process.err
