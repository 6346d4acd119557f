"""Which files make up a split of a data set: the same as the `datasets` library chooses, in the same order."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fake_hub import FakeHub
from orchestrator._native import DataError, DataSource


@dataclass(frozen=True)
class Layout:
    """A repository's files and what to ask of it; each file holds documents that name it."""

    files: tuple[str, ...]
    card: str = ""
    asks: tuple[tuple[str | None, str], ...] = ((None, "train"),)


LAYOUTS = {
    "shards": Layout(
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"),
        asks=((None, "train"), (None, "test"), (None, "validation")),
    ),
    "shards with a hash, and splits of their own names": Layout(
        ("data/train-00000-of-00001-0a1b2c.parquet", "data/extra-00000-of-00001.parquet", "notes/train.jsonl"),
        asks=((None, "train"), (None, "extra")),
    ),
    "folders": Layout(
        ("train/b.jsonl", "train/a.jsonl", "test/c.jsonl", "validation/deep/d.jsonl"),
        asks=((None, "train"), (None, "test"), (None, "validation")),
    ),
    "folders by other words": Layout(
        ("training/a.jsonl", "dev/b.jsonl", "eval-2020/c.jsonl"),
        asks=((None, "train"), (None, "validation"), (None, "test")),
    ),
    "file names": Layout(
        ("train.jsonl", "test.jsonl", "my_valid_1.jsonl", "other.jsonl"),
        asks=((None, "train"), (None, "test"), (None, "validation")),
    ),
    "names that only look like splits": Layout(
        ("trainer.jsonl", "contest.jsonl", "devices.jsonl"), asks=((None, "train"), (None, "test"))
    ),
    "no hint at all": Layout(("x/b.parquet", "a.parquet", "x/y/c.parquet"), asks=((None, "train"), (None, "test"))),
    "hidden and describing files": Layout(
        ("a.jsonl", ".hidden/b.jsonl", "__pycache__/c.jsonl", "dataset_infos.json", "sub/.d.jsonl"),
    ),
    "compressed lines": Layout(
        ("a.jsonl.gz", "b.jsonl.zst", "c.jsonl"),
    ),
    "mixed kinds": Layout(
        ("a.jsonl", "b.parquet", "c.parquet", "d.parquet"),
    ),
    "configs with globs": Layout(
        ("data/CC-1/a.parquet", "data/CC-1/b.parquet", "data/CC-2/c.parquet", "sample/10BT/d.parquet"),
        card="configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: CC-2\n  data_files:\n  - split: train\n    path: data/CC-2/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n",
        asks=((None, "train"), ("CC-2", "train"), ("sample-10BT", "train"), ("default", "test"), ("gone", "train")),
    ),
    "a config with several splits and lists of files": Layout(
        ("b.jsonl", "a.jsonl", "c.jsonl", "d.jsonl"),
        card="configs:\n- config_name: main\n  default: true\n  data_files:\n"
        "  - split: train\n    path: [b.jsonl, a.jsonl]\n  - split: held_out\n    path: c.jsonl\n"
        "- config_name: other\n  data_files: d.jsonl\n",
        asks=((None, "train"), ("main", "held_out"), ("other", "train"), ("main", "test")),
    ),
    "a config with a folder": Layout(
        ("en/train.jsonl", "en/test.jsonl", "de/train-1.jsonl", "de/train-2.jsonl"),
        card="configs:\n- config_name: en\n  data_dir: en\n- config_name: de\n  data_dir: de\n",
        asks=(("en", "train"), ("en", "test"), ("de", "train"), (None, "train")),
    ),
    "one config of any name is the default": Layout(
        ("x/a.jsonl", "y/b.jsonl"),
        card="configs:\n- config_name: only\n  data_files: x/*.jsonl\n",
        asks=((None, "train"), ("only", "train")),
    ),
    "a pattern over folders": Layout(
        ("lang/en/1.jsonl", "lang/en/sub/2.jsonl", "lang/de/3.jsonl", "top.jsonl"),
        card="configs:\n- config_name: default\n  data_files: lang/**\n",
    ),
    "overlapping patterns": Layout(
        ("p/a.jsonl", "p/b.jsonl", "p/c.jsonl"),
        card="configs:\n- config_name: default\n  data_files: [p/c.jsonl, 'p/*.jsonl']\n",
    ),
    "nothing to read": Layout(("LICENSE",)),
}

READ_WITH_DATASETS = """
import json, os, sys
from datasets import load_dataset
answers = []
for name, config, split in json.load(sys.stdin):
    try:
        rows = load_dataset(name, name=config, split=split, streaming=True)
        answers.append([row["text"] for row in rows])
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers), flush=True)
os._exit(0)  # the client's prefetching threads can abort an interpreter that ends in the usual way
"""

READ_WITH_US = """
import json, sys
from orchestrator import TrainerError
from orchestrator._native import DataSource
answers = []
for name, config, split in json.load(sys.stdin):
    try:
        answers.append(list(DataSource.streaming(name, split, config).documents()))
    except TrainerError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers), flush=True)
"""


def write(path: Path, documents: list[str]) -> None:
    """Write documents in the format that the name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": documents}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines))
    elif path.name == "dataset_infos.json":
        path.write_text("{}")
    else:
        path.write_bytes(lines)


def ask(script: str, asks: list[tuple[str, str | None, str]], hub: FakeHub, cache: Path) -> list[Any]:
    """Let a client answer in a process of its own: clients read the endpoint when they are imported."""
    environment = {**os.environ, **hub.environment(cache), "ORCHESTRATE_CACHE_ROOT": str(cache / "ours")}
    command = [sys.executable, "-c", script]
    process = subprocess.run(
        command, input=json.dumps(asks), env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    answers = json.loads(process.stdout.splitlines()[-1])
    assert isinstance(answers, list)
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None, str], tuple[Any, Any]]:
    """The answers of `datasets` and ours to every question, by layout, config and split."""
    root = tmp_path_factory.mktemp("layouts")
    questions = []
    for number, (title, layout) in enumerate(LAYOUTS.items()):
        folder = root / f"hub/datasets/owner/layout-{number}"
        for file in layout.files:
            write(folder / file, [f"{file} row {row}" for row in range(3)])
        if layout.card:
            (folder / "README.md").write_text(f"---\n{layout.card}---\n# A data set\n")
        questions += [(title, f"owner/layout-{number}", config, split) for config, split in layout.asks]
    asks = [question[1:] for question in questions]
    with FakeHub(root / "hub") as hub:
        theirs = ask(READ_WITH_DATASETS, asks, hub, root / "theirs")
        ours = ask(READ_WITH_US, asks, hub, root / "ours")
    keys = [(title, config, split) for title, _, config, split in questions]
    return dict(zip(keys, zip(theirs, ours, strict=True), strict=True))


def test_a_downloaded_folder_has_the_same_splits(
    tmp_path: Path, answers: dict[tuple[str, str | None, str], tuple[Any, Any]]
) -> None:
    for number, (title, layout) in enumerate(LAYOUTS.items()):
        folder = tmp_path / str(number)
        for file in layout.files:
            write(folder / file, [f"{file} row {row}" for row in range(3)])
        # A card is not read; local files of several formats are read together.
        for config, split in () if layout.card or title == "mixed kinds" else layout.asks:
            theirs = answers[title, config, split][0]
            try:
                ours = list(DataSource.local([str(folder)], split=split).documents())
            except DataError:
                assert isinstance(theirs, str), f"{title} {split}: datasets reads {theirs}"
            else:
                assert sorted(ours) == sorted(theirs), (title, split)


@pytest.mark.parametrize("title", LAYOUTS)
def test_our_documents_come_in_the_order_of_datasets(title: str, answers: dict[Any, tuple[Any, Any]]) -> None:
    for config, split in LAYOUTS[title].asks:
        theirs, ours = answers[title, config, split]
        if isinstance(theirs, list):
            # A file that two patterns name is read once: every document is trained on exactly once an epoch.
            assert ours == list(dict.fromkeys(theirs)), (config, split)
        else:
            assert isinstance(ours, str), f"{config} {split}: datasets says {theirs}, we read {ours}"
