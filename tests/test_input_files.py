"""Input files that are not what they seem: pipes, links, byte order marks, columns that are not there."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from orchestrator import _native
from workspace import TINY_MODEL, Finished, Workspace

MARK = b"\xef\xbb\xbf"
# A guard against hanging.
GUARD = 30


def make_run(workspace: Workspace) -> Path:
    """Train a small run; return its folder."""
    text = workspace.write_text(characters=40_000)
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=3", "--experiment=made").succeeded()
    return workspace.run_folder("made")


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def lines(count: int = 200, column: str = "text") -> bytes:
    return b"".join(
        json.dumps({column: f"document {number}", "id": number}).encode() + b"\n" for number in range(count)
    )


def texts(*patterns: Path) -> list[str]:
    return list(_native.DataSource.local([str(pattern) for pattern in patterns]).documents())


def test_pipes_and_devices_are_refused_wherever_a_file_is_named(workspace: Workspace) -> None:
    folder, root = make_run(workspace), workspace.root
    book = ("--input", root / "book.txt")
    device = root / "zero.txt"
    device.symlink_to("/dev/zero")

    def refused(process: Finished, code: int, path: Path) -> None:
        process.refused(code, path.name, "a device" if path == device else "a named pipe")

    for path in (pipe(root / "p.jsonl"), pipe(root / "p.parquet"), device):
        refused(workspace.orchestrate("--input", path, *TINY_MODEL, timeout=GUARD), 3, path)
        refused(workspace.trainer("evaluate", "--experiment=made", "--input", path, timeout=GUARD), 3, path)
    config = pipe(root / "p.yaml")
    refused(workspace.orchestrate("--config", config, timeout=GUARD), 2, config)
    refused(workspace.trainer("train", "--config", config, timeout=GUARD), 2, config)
    fifo = pipe(root / "p.json")
    refused(workspace.orchestrate(*book, *TINY_MODEL, "--tokenizer-json", fifo, timeout=GUARD), 2, fifo)
    override = ("--override", f"tokenizer.special_tokens={fifo}")
    refused(workspace.orchestrate(*book, *TINY_MODEL, *override, "--experiment=x", timeout=GUARD), 2, fifo)
    override = ("--override", f"tokenizer.tokenizer_json={fifo}")
    refused(workspace.trainer("plan", "--config", folder / "training.yaml", *override, timeout=GUARD), 2, fifo)
    for path in (pipe(root / "prompt"), device):
        generate = ("generate", "--experiment=made", "--prompt-file", path)
        refused(workspace.trainer(*generate, timeout=GUARD), 2, path)
        refused(workspace.orchestrate(*generate, timeout=GUARD), 2, path)
    streaming = pipe(folder / "streaming_config.json")
    refused(workspace.trainer("train", "--config", folder / "training.yaml", timeout=GUARD), 2, streaming)
    refused(workspace.orchestrate("--experiment=made", "--resume", "--dataset=demo", timeout=GUARD), 2, streaming)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "MANIFEST.json", "tokenizer.json"])
def test_a_pipe_in_a_checkpoint_is_damage(workspace: Workspace, name: str) -> None:
    checkpoint = make_run(workspace) / "checkpoints" / "step-00000003"
    pipe(checkpoint / name)
    workspace.trainer("checkpoint", "verify", checkpoint, timeout=GUARD).refused(5, name, "a named pipe")
    generate = ("generate", "--checkpoint", checkpoint, "--prompt=x")
    workspace.trainer(*generate, timeout=GUARD).refused(5, name, "a named pipe")
    workspace.orchestrate(*generate, timeout=GUARD).refused(5, name, "a named pipe")


def test_links_lead_to_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(30))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path)
    (tmp_path / "again.jsonl").symlink_to("a.jsonl")
    for patterns in ([tmp_path], [tmp_path / "*.jsonl"], [tmp_path / "again.jsonl", tmp_path / "a.jsonl", tmp_path]):
        assert len(texts(*patterns)) == 30, patterns


def test_skipped_files_are_reported(workspace: Workspace) -> None:
    folder = workspace.root / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines())
    (folder / "gone.jsonl").symlink_to("nothing.jsonl")
    pipe(folder / "pipe.jsonl")
    process = workspace.orchestrate(
        *TINY_MODEL, "--input", folder, "--steps=3", "--experiment=links", timeout=60
    ).succeeded()
    for note in (
        "gone.jsonl is skipped: it is a broken symbolic link",
        "pipe.jsonl is skipped: it is a named",
    ):
        assert process.out.count(note) == 2, "by the pipeline and by the trainer"
    process = workspace.trainer("evaluate", "--experiment=links", "--input", folder).succeeded()
    assert "gone.jsonl is skipped" in process.err


def test_a_column_that_is_not_there_is_named_with_those_that_are(workspace: Workspace) -> None:
    folder = make_run(workspace)
    other, parquet = workspace.root / "other.jsonl.gz", workspace.root / "other.parquet"
    other.write_bytes(gzip.compress(lines(column="content")))
    pq.write_table(pa.table({"n": [1, 2], "body": ["a", "b"], "tags": [["a"], []]}), parquet)
    numbers = workspace.root / "numbers.parquet"
    pq.write_table(pa.table({"n": [1, 2]}), numbers)

    def evaluated(path: Path, column: str = "text") -> Finished:
        flags = ("--experiment=made", "--input", path, "--text-column", column)
        return workspace.trainer("evaluate", *flags)

    evaluated(other).refused(3, "other.jsonl.gz has no text column `text`; its text columns are content: choose")
    evaluated(other, "id").refused(
        3, "the column `id` of other.jsonl.gz holds numbers, not strings; its text columns are"
    )
    evaluated(parquet, "n").refused(
        3, "the column `n` of other.parquet holds integers, not strings; its text columns are body"
    )
    evaluated(parquet, "tags").refused(3, "the column `tags` of other.parquet holds lists, not strings")
    evaluated(numbers).refused(
        3, "numbers.parquet has no text column `text`; no other column holds strings: choose other"
    )
    evaluated(numbers, "n").refused(3, "holds integers, not strings; no other column holds strings")
    override = ("--override", f"data.train_shards=[{other}]", "--override", "runtime.checkpoint.directory=elsewhere")
    process = workspace.trainer("train", "--config", folder / "training.yaml", *override)
    process.refused(3, "other.jsonl.gz has no text column `text`; its text columns are content")
    assert "too small" not in process.out
    workspace.orchestrate(*TINY_MODEL, "--input", other, "--experiment=x").refused(
        3, "no text column `text`", "content"
    )


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_byte_order_mark_costs_no_document(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    content = MARK + lines(3)
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    assert texts(path) == ["document 0", "document 1", "document 2"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(MARK + b"hello")
    assert texts(tmp_path) == ["hello"]


@pytest.mark.slow
def test_a_byte_order_mark_in_a_file_of_a_run_is_no_content(workspace: Workspace) -> None:
    folder = make_run(workspace)

    def marked(path: Path) -> Path:
        path.write_bytes(MARK + path.read_bytes())
        return path

    config = marked(Path(shutil.copy(folder / "training.yaml", workspace.root / "marked.yaml")))
    workspace.trainer("plan", "--config", config).succeeded()
    book = ("--input", workspace.root / "book.txt")
    workspace.orchestrate(*book, "--config", config, "--launch=none", "--experiment=marked").succeeded()
    tokens = workspace.root / "tokens.txt"
    tokens.write_text('["<|endoftext|>", "<|pad|>", "<|mine|>"]')
    override = ("--override", f"tokenizer.special_tokens={marked(tokens)}")
    workspace.orchestrate(*TINY_MODEL, *book, *override, "--launch=none", "--experiment=tokens").succeeded()
    prompt = workspace.root / "prompt.txt"
    prompt.write_text("def main")
    generate = ("generate", "--experiment=made", "--prompt-file", marked(prompt), "--max-tokens=1", "--json")
    for program in (workspace.trainer, workspace.orchestrate):
        assert json.loads(program(*generate).succeeded().out)["prompt"] == "def main"
    workspace.orchestrate("--stream", "--dataset=demo", *TINY_MODEL, "--launch=none", "--experiment=demo").succeeded()
    marked(workspace.run_folder("demo") / "streaming_config.json")
    resume = ("--experiment=demo", "--resume", "--dataset=other/one")
    workspace.orchestrate(*resume).refused(2, "trains on demo")


def renumbered(workspace: Workspace, name: str, gap: int) -> Path:
    """Return the tokenizer of the small run with a gap after its 300th id."""
    tokenizer = json.loads((workspace.root / "artifacts/tokenizer/made/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: number + gap * (number >= 300) for token, number in vocab.items()}
    path = workspace.root / name
    path.write_text(json.dumps(tokenizer))
    return path


def test_a_tokenizer_with_gaps_in_its_ids_trains_and_writes(workspace: Workspace) -> None:
    make_run(workspace)
    gaps = renumbered(workspace, "gaps.json", 50)
    flags = ("--input", workspace.root / "book.txt", "--tokenizer-json", gaps, "--steps=6", "--experiment=gaps")
    out = workspace.orchestrate(*TINY_MODEL, *flags).succeeded().out
    assert "434 tokens" in out
    assert json.loads((workspace.run_folder("gaps") / "resolved_config.json").read_text())["model"]["vocab_size"] == 434
    ask = ("generate", "--experiment=gaps", "--prompt=def ", "--temperature=3", "--max-tokens=24", "--json")
    answer = json.loads(workspace.trainer(*ask).succeeded().out)
    assert len(answer["tokens"]) == 24
    assert any(300 <= token < 350 for token in answer["tokens"]), "an id in the gap writes nothing"
    assert workspace.metrics("gaps", "evaluation")[-1]["bits_per_byte"] > 0


def test_a_tokenizer_with_millions_of_unused_ids_is_refused(workspace: Workspace) -> None:
    make_run(workspace)
    for first, phrases in ((10_000_000, ("10000383", "384 tokens")), (3_000_000_000, ("30000003", "below 16777216"))):
        huge = renumbered(workspace, "huge.json", first)
        flags = ("--input", workspace.root / "book.txt", "--tokenizer-json", huge, "--experiment=huge")
        workspace.orchestrate(*TINY_MODEL, *flags).refused(2, "huge.json", *phrases)
        assert not workspace.run_folder("huge").exists()
