"""Bad documents are counted, told and left out: the same ones by any number of threads, and after kills."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub.fineweb import documents
from killing import CONFIG, KilledRun
from workspace import TRAINER, Workspace

HUGE = 50 << 20
GOOD = 120
# Numbers of bad documents in two files of JSON lines, one of Parquet, and a text file with a bad piece.
LEFT_OUT = {"without text": 5, "empty": 3, "not UTF-8": 4, "not a JSON object with a string": 2, "over 16 MiB": 3}


def json_lines(texts: list[str]) -> bytes:
    lines = [json.dumps({"text": text}).encode() for text in texts]
    bad = [b'{"text": null}', b'{"other": 1}', b'{"text": ""}', b'{"text": "\xff"}', b'{"text": "cut off']
    bad.append(b'{"text": "' + b"x" * HUGE + b'"}')
    for number, line in enumerate(bad):
        lines.insert(7 * number + 3, line)
    return b"\n".join(lines) + b"\n"


def write_shards(folder: Path) -> None:
    """Write every kind of bad document in every format that can have it."""
    folder.mkdir()
    texts = iter(documents(mean_characters=300))

    def take() -> list[str]:
        return [next(texts) for _ in range(GOOD)]

    (folder / "a.jsonl").write_bytes(json_lines(take()))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(take()), 1))
    rows: list[bytes | None] = [text.encode() for text in take()]
    rows[5:5] = [None, b"", b"\xff\xfe", b"x" * HUGE]
    pq.write_table(pa.table({"text": pa.array(rows, pa.binary())}), folder / "c.parquet", row_group_size=20)
    text = bytearray("\n".join(take()).encode())
    text[len(text) // 2] = 0xFF
    (folder / "d.txt").write_bytes(text)
    (folder / "e.txt").write_bytes(b"")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards")
    return tmp_path / "shards"


def make_run(workspace: Workspace, shards: Path, experiment: str, workers: int) -> KilledRun:
    """Make a run of one epoch over the shards, and do not start it."""
    if not workspace.run_folder("template").exists():
        flags = ("--preset=smoke_cpu", "--vocab-size=384", "--steps=1", "--launch=none", "--experiment=template")
        workspace.orchestrate("--input", workspace.write_text(), *flags).succeeded()
    folder = workspace.run_folder(experiment)
    folder.mkdir()
    tokenizer = workspace.root / "artifacts/tokenizer/template/tokenizer.json"
    # Of the shards nothing is held out: training skips every bad document.
    files = f"train_shards: [{shards}], validation_shards: [{workspace.root / 'book.txt'}]"
    config = CONFIG.replace("data: {", f"data: {{{files}, num_workers: {workers}, ")
    (folder / "training.yaml").write_text(f"{config}tokenizer: {{tokenizer_json: {tokenizer}}}\n")
    return KilledRun(workspace, experiment)


@pytest.mark.slow
def test_the_same_documents_are_skipped_at_any_thread_count(workspace: Workspace, shards: Path) -> None:
    single_run, busy_run, killed_run = (make_run(workspace, shards, f"workers-{name}", name) for name in (1, 8, 2))
    assert not single_run.live()
    assert not busy_run.live()
    chance = random.Random(7)
    for _ in range(5):
        assert killed_run.live(chance.randint(10, 40))
    assert not killed_run.live()
    assert busy_run.results() == single_run.results() == killed_run.results()
    counts = ", ".join(f"{count} {reason}" for reason, count in LEFT_OUT.items())
    for run in (single_run, busy_run):
        assert f"rows skipped: {counts}\n" in run.lines
    assert killed_run.proof()["problems"] == []
    records = [json.loads(line) for line in (killed_run.folder / "ledger.jsonl").read_text().splitlines()]
    skipped_counts = [sum(record["skipped"].values()) for record in records if record["kind"] == "window"]
    assert sum(skipped_counts) == sum(LEFT_OUT.values())


@pytest.mark.parametrize("name", ["line.jsonl", "line.jsonl.gz", "line.txt"])
def test_memory_stays_bounded_for_a_line_of_fifty_megabytes(workspace: Workspace, name: str) -> None:
    def peak(experiment: str, huge: bytes) -> int:
        folder = workspace.root / experiment
        folder.mkdir()
        (folder / "good.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
        if huge:
            (folder / name).write_bytes(gzip.compress(huge, 1) if name.endswith(".gz") else huge)
        run = make_run(workspace, folder, f"run-{experiment}", 2)
        command = [str(TRAINER), "train", "--config", str(run.folder / "training.yaml"), "--max-steps", "20"]
        process = subprocess.Popen(command, cwd=workspace.root, env=workspace.environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_maxrss * 1024

    line = b"x" * HUGE
    huge = line if name.endswith(".txt") else b'{"text": "' + line + b'"}\n'
    assert peak("with", huge) - peak("without", b"") < 3 * HUGE
