"""A file that cannot be decoded does not end a run: it is skipped and recorded, or repaired and accepted."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from itertools import islice
from pathlib import Path

import pytest
from fake_hub.fineweb import documents
from killing import CONFIG, KilledRun
from workspace import TINY_MODEL, Workspace

FILES = 24
BAD = 17


def write_files(folder: Path, damaged: bool = True) -> None:
    """Write gzip files of JSON lines, one of them cut off in its middle."""
    folder.mkdir(exist_ok=True)
    texts = iter(documents(mean_characters=300))
    for number in range(FILES):
        lines = "".join(json.dumps({"text": next(texts)}) + "\n" for _ in range(12))
        content = gzip.compress(lines.encode(), mtime=0)
        cut = content[: len(content) // 2] if damaged and number == BAD else content
        (folder / f"p{number:02}.jsonl.gz").write_bytes(cut)


def prepared(workspace: Workspace, experiment: str, on_bad_file: str = "skip") -> KilledRun:
    """Prepare a run of one epoch over the files, with a tokenizer of other text."""
    if not workspace.run_folder("template").exists():
        flags = ("--preset=smoke_cpu", "--vocab-size=384", "--steps=1", "--launch=none", "--experiment=template")
        workspace.orchestrate("--input", workspace.write_text(), *flags).succeeded()
    folder = workspace.run_folder(experiment)
    folder.mkdir()
    tokenizer = workspace.root / "artifacts/tokenizer/template/tokenizer.json"
    data = f"data: {{train_shards: [{workspace.root / 'in'}], on_bad_file: {on_bad_file}, "
    config = CONFIG.replace("data: {", data)
    (folder / "training.yaml").write_text(f"{config}tokenizer: {{tokenizer_json: {tokenizer}}}\n")
    return KilledRun(workspace, experiment)


def test_a_bad_file_is_skipped_told_and_proven(workspace: Workspace) -> None:
    write_files(workspace.root / "in")
    run, killed_run = prepared(workspace, "whole"), prepared(workspace, "killed")
    assert not run.live()
    chance = random.Random(7)
    for _ in range(2):
        assert killed_run.live(chance.randint(12, 45))
    assert not killed_run.live()
    assert killed_run.results() == run.results()
    name = f"p{BAD:02}.jsonl.gz"
    (warning,) = [line for line in run.lines if line.startswith(f"warning: {name} is corrupted")]
    assert "are skipped" in warning
    assert "1 file of which rows were skipped because they are corrupted\n" in run.lines
    records = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    corrupted = [record for record in records if record["kind"] == "corrupted"]
    assert [(record["name"], record["file"]) for record in corrupted] == [(name, BAD)]
    proof = killed_run.proof()
    assert proof["problems"] == []
    assert name in proof["components"][0]["corrupted"][0]
    assert workspace.metrics("whole", "data")[-1]["bad_files"] == 1
    status = workspace.orchestrate("watch", run.folder, "--once").succeeded().out
    assert "1 file, skipped as far as unreadable" in status


def test_a_stopped_run_resumes_with_the_repaired_file(workspace: Workspace) -> None:
    write_files(workspace.root / "in")
    run = prepared(workspace, "stopped", "stop")
    config = run.folder / "training.yaml"
    workspace.trainer("train", "--config", config).refused(3, f"p{BAD:02}.jsonl.gz is corrupted")
    write_files(workspace.root / "in", damaged=False)
    refused_process = workspace.trainer("train", "--config", config, "--resume")
    refused_process.refused(2, f"p{BAD:02}.jsonl.gz had ", "bytes and has", "--accept-changed-data")
    process = workspace.trainer("train", "--config", config, "--resume", "--accept-changed-data").succeeded()
    assert "changed data accepted: " in process.out
    proof = run.proof()
    assert proof["problems"] == []
    assert f"p{BAD:02}.jsonl.gz had " in proof["components"][0]["changed"][0]
    assert proof["components"][0]["epochs"][0]["documents"] > 11 * FILES


def test_changed_files_that_were_consumed_are_refused(workspace: Workspace) -> None:
    write_files(workspace.root / "in", damaged=False)
    run = prepared(workspace, "changed")
    config = run.folder / "training.yaml"
    workspace.trainer("train", "--config", config, "--max-steps=20").succeeded()
    consumed = json.loads((run.folder / "ledger.jsonl").read_text().splitlines()[1])["pieces"][0]["file"]
    other = "".join(json.dumps({"text": f"another text {number}"}) + "\n" for number in range(12))
    (workspace.root / "in" / f"p{consumed:02}.jsonl.gz").write_bytes(gzip.compress(other.encode()))
    resume = ("train", "--config", config, "--resume", "--accept-changed-data")
    workspace.trainer(*resume).refused(2, f"p{consumed:02}.jsonl.gz", "What the run has consumed of them differs")
    workspace.trainer("train", "--config", config, "--accept-changed-data").refused(2, "with --resume")


def write_lines(path: Path, first: int, count: int) -> None:
    """Append JSON lines to a file."""
    texts = islice(documents(mean_characters=300), first, first + count)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def started_on_lines(
    workspace: Workspace, experiment: str, steps: int
) -> tuple[KilledRun, Path, tuple[str | Path, ...]]:
    """Train for some steps on four plain files of 20 rows; return the run, its data and the words to resume it."""
    folder = workspace.root / "in"
    folder.mkdir(exist_ok=True)
    for number in range(4):
        write_lines(folder / f"p{number}.jsonl", 20 * number, 20)
    run = prepared(workspace, experiment)
    config = run.folder / "training.yaml"
    config.write_text(config.read_text().replace("total_epochs: 1", "total_steps: 200"))
    workspace.trainer("train", "--config", config, f"--max-steps={steps}").succeeded()
    return run, folder, ("train", "--config", config, "--resume", "--accept-changed-data")


def test_rows_appended_to_consumed_files_are_read_next_epoch(workspace: Workspace) -> None:
    run, folder, resume = started_on_lines(workspace, "appended", 8)
    write_lines(folder / "p1.jsonl", 80, 14)
    write_lines(folder / "a-new.jsonl", 94, 8)
    workspace.trainer(*resume[:-1]).refused(2, "p1.jsonl had ", "a-new.jsonl was added", "--accept-changed-data")
    process = workspace.trainer(*resume, "--max-steps=120").succeeded()
    assert "were made again and are identical; what was added is read from the next epoch on" in process.out
    proof = run.proof()
    assert proof["problems"] == []
    first, second, *_ = proof["components"][0]["epochs"]
    assert second["rows"] - first["rows"] == 14 + 8
    assert any("a-new.jsonl was added" in change for change in proof["components"][0]["changed"])
    replay = ("validate-data", run.folder, "--replay=1", "--replay=8", "--replay=100")
    workspace.trainer(*replay).succeeded()
    # The run knows its files from its checkpoint: nothing is to be accepted again.
    workspace.trainer(*resume[:-1], "--max-steps=121").succeeded()


def test_removed_files_are_refused_while_a_window_needs_them(workspace: Workspace) -> None:
    run, folder, resume = started_on_lines(workspace, "removed", 8)
    records = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    window = [record for record in records if record["kind"] == "window"][-1]
    window_files = {piece["file"] for piece in window["pieces"]}
    in_use = folder / f"p{min(window_files)}.jsonl"
    content = in_use.read_bytes()
    in_use.unlink()
    process = workspace.trainer(*resume)
    process.refused(2, f"{in_use.name} cannot be removed, as the shuffle window in use", "--init-from")
    in_use.write_bytes(content)


def test_changes_of_a_first_version_run_are_refused_with_reason(workspace: Workspace) -> None:
    run, folder, resume = started_on_lines(workspace, "old", 1)
    config = run.folder / "training.yaml"
    for name in ("checkpoints", "ledger.jsonl", "metrics.jsonl"):
        path = run.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    version = "--override=data.reading_version=1"
    workspace.trainer("train", "--config", config, version, "--max-steps=4").succeeded()
    write_lines(folder / "p1.jsonl", 240, 4)
    workspace.trainer(*resume, version).refused(2, "records no list of its files", "--init-from")


@pytest.mark.parametrize("bad", [2, FILES])
def test_many_bad_files_end_a_run_with_their_names(workspace: Workspace, bad: int) -> None:
    write_files(workspace.root / "in", damaged=False)
    for number in range(bad):
        (workspace.root / "in" / f"p{number:02}.jsonl.gz").write_bytes(b"no gzip at all")
    workspace.orchestrate("--input", "in", *TINY_MODEL, "--steps=9").refused(3, "p00.jsonl.gz", "p01.jsonl.gz")


UNUSABLE: dict[str, tuple[bytes, str]] = {
    "other column": (b'{"body": "some text"}\n' * 30, "no row of other.jsonl can be used: of 30 that were read, 30 "),
    "all null": (b'{"text": null}\n' * 30, "no row of other.jsonl can be used: of 30 that were read, 30 without text"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "other.jsonl is corrupted"),
    "two bytes": (('{"text": "some text"}\n' * 30).encode("utf-16"), "other.jsonl is corrupted"),
    "pretty": (b'{\n  "text": "some text"\n}\n' * 30, "other.jsonl is corrupted"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_files_are_told_before_training(workspace: Workspace, kind: str) -> None:
    folder = workspace.root / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", 0, 300)
    content, message = UNUSABLE[kind]
    (folder / "other.jsonl").write_bytes(content)
    process = workspace.orchestrate("--input", "in", *TINY_MODEL, "--steps=4", "--launch=none").succeeded()
    assert f"warning: {message}" in process.out
    if "no row" in message:
        assert "rows that are skipped: 30 of 330 (30 " in process.out


def test_skipped_rows_and_repeated_text_are_told_at_once(workspace: Workspace) -> None:
    texts = islice(documents(), 300)
    rows = [json.dumps({"text": text if number % 2 else number}) for number, text in enumerate(texts)]
    (workspace.root / "half.jsonl").write_text("\n".join(rows) + "\n")
    flags = (*TINY_MODEL, "--experiment=half", "--override=data.packing=concat")
    prepared_run = workspace.orchestrate("--input", "half.jsonl", *flags, "--steps=4000", "--launch=none").succeeded()
    assert "warning: rows are skipped, so far 1 of 1 (1 not a JSON object with a string)" in prepared_run.out
    assert "warning: more than 1 % of the rows are skipped: 50 of 100" in prepared_run.out
    assert "the text of --input is about" in prepared_run.err
    assert "the same documents are read about" in prepared_run.err
    process = workspace.trainer(
        "train", "--config", workspace.run_folder("half") / "training.yaml", "--max-steps=3"
    ).succeeded()
    lines = process.out.splitlines()
    warning_line = next(
        number for number, line in enumerate(lines) if line.startswith("warning: rows are skipped, so far")
    )
    assert " of half.jsonl, not a JSON object with a string" in lines[warning_line]
    assert warning_line < next(number for number, line in enumerate(lines) if line.startswith("step 3"))
    assert workspace.metrics("half", "data")[-1]["malformed"] > 0
    status = workspace.orchestrate("watch", "half", "--once").succeeded().out
    assert "not a JSON object with a string" in status
