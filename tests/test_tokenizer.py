"""The tokenizer of an experiment: what it is trained on, what is told about it, the same bytes on every machine."""

from __future__ import annotations

import os
import pty
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from orchestrator import tokenizer
from orchestrator.progress import reading
from tokenizers import Tokenizer
from workspace import TINY_MODEL, Workspace

DEMO = [*TINY_MODEL, "--stream", "--dataset=demo", "--launch=none", "--tokenizer-max-lines=200"]


def trained(folder: Path, texts: Iterator[str], max_documents: int = 300, max_bytes: int = 10**8) -> tokenizer.Facts:
    source = {"name": "texts", "text_column": "text"}
    request = tokenizer.Request(400, ["<|endoftext|>"], source, max_documents, seed=None, max_bytes=max_bytes)
    with reading() as watch:
        facts = tokenizer.train(folder, request, texts, watch).facts
    assert facts is not None
    return facts


@pytest.mark.slow
def test_a_seed_gives_the_same_bytes_at_any_thread_count(workspace: Workspace) -> None:
    files = []
    runs = [("one", "1", 7), ("eight", "8", 7), ("again", "8", 7), ("other", "8", 8)]
    for experiment, threads, seed in runs:
        own = Workspace(workspace.root, {"RAYON_NUM_THREADS": threads})
        flags = [f"--experiment={experiment}", f"--tokenizer-seed={seed}", f"--loader-workers={threads}"]
        own.orchestrate(*DEMO, *flags).succeeded()
        files.append((workspace.root / "artifacts/tokenizer" / experiment / "tokenizer.json").read_bytes())
    assert files[0] == files[1] == files[2]
    assert files[0] != files[3]


def test_compression_is_reported_of_held_out_text(tmp_path: Path) -> None:
    texts = [("quokka " if number % 50 == 0 else "panda ") * 30 for number in range(1, 301)]
    facts = trained(tmp_path / "made", iter(texts))
    held_out = texts[49::50]
    trained_tokenizer = Tokenizer.from_file(str(tmp_path / "made/tokenizer.json"))
    tokens = sum(len(encoding) for encoding in trained_tokenizer.encode_batch(held_out))
    assert facts.documents == len(texts) - len(held_out)
    assert facts.held_out_bytes == sum(map(len, held_out))
    assert facts.bytes_per_token == facts.held_out_bytes / tokens
    assert facts.tokens_per_word == tokens / (30 * len(held_out))
    assert "panda" in trained_tokenizer.get_vocab()
    assert "uo" not in trained_tokenizer.get_vocab()


def test_an_endless_source_is_read_to_the_budget_and_no_further(tmp_path: Path) -> None:
    numbers = list[int]()

    def texts() -> Iterator[str]:
        for number in count():
            numbers.append(number)
            yield f"{number} green bottles hanging on the wall, " * 25

    facts = trained(tmp_path / "made", texts(), max_documents=10**9, max_bytes=200_000)
    assert 200_000 <= facts.bytes < 202_000
    assert len(numbers) == facts.documents + len(numbers) // 50


def test_a_source_of_few_documents_spares_none(tmp_path: Path) -> None:
    facts = trained(tmp_path / "made", iter(["the same few words"] * 20))
    assert (facts.documents, facts.held_out_bytes, facts.bytes_per_token) == (20, 0, None)


def test_progress_is_printed_in_plain_lines_without_a_terminal(workspace: Workspace) -> None:
    out = workspace.orchestrate(*DEMO, "--experiment=told").succeeded().out
    assert out.count("           read ") == 10
    assert "read 200 documents" in out
    assert "bytes per token" in out
    assert "tokens per word on" in out
    assert "GPT-2" not in out
    assert "\x1b" not in out


def test_one_document_is_counted_in_the_singular(workspace: Workspace) -> None:
    (workspace.root / "one.txt").write_text("a page of text\n")
    process = workspace.orchestrate(
        "--input=one.txt", "--vocab-size=300", "--experiment=one", "--launch=none"
    ).succeeded()
    assert "from 1 document, " in process.out


def test_a_tokenizer_that_is_not_there_is_not_skipped(workspace: Workspace) -> None:
    process = workspace.orchestrate(*DEMO, "--experiment=new", "--skip-tokenizer")
    process.refused(2, "artifacts/tokenizer/new/tokenizer.json is not there: leave out the flag to train one")


def test_a_terminal_shows_a_bar(workspace: Workspace) -> None:
    command = [str(Path(sys.executable).parent / "orchestrate"), *DEMO, "--experiment=seen"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(workspace.root)
        os.execve(command[0], command, {**workspace.environment, "TERM": "xterm"})
    screen = b"".join(iter(lambda: _read(terminal), b"")).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, screen
    assert "merging pairs of tokens" in screen
    assert "━" in screen
    assert "bytes per token" in screen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux raises it once the other side has closed
        return b""


@pytest.mark.slow
def test_a_cached_gpt2_tokenizer_is_compared(workspace: Workspace) -> None:
    """Ours stands in for GPT-2's, so that both figures are equal."""
    workspace.orchestrate(*DEMO, "--experiment=first").succeeded()
    cached = workspace.root / "hf/hub/models--openai-community--gpt2"
    snapshot = cached / "snapshots" / "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(snapshot.name)
    shutil.copy(workspace.root / "artifacts/tokenizer/first/tokenizer.json", snapshot)
    with_cache = Workspace(workspace.root, {"HF_HOME": str(workspace.root / "hf")})
    out = with_cache.orchestrate(*DEMO, "--experiment=second").succeeded().out
    ours = out.split(" bytes per token")[0].split()[-1]
    assert f"GPT-2's: {ours} bytes per token" in out
