"""Mixed text of this machine as a data set: FineWeb's columns, row groups and page lengths, and a tokenizer for it."""

from __future__ import annotations

import json
import os
import random
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fake_hub.fineweb import COLUMNS, row
from orchestrator import RunConfig, TokenStream, tokenizer
from orchestrator.progress import reading
from ours import config
from setting import NAME, Setting

SUFFIXES = {".py", ".rs", ".md", ".rst", ".txt", ".c", ".h", ".pyi"}
LARGEST_SOURCE = 1_000_000
FILES = 40
"""A multiple of 20: `datasets` 5 shuffles ten shares of the files side by side and deals each share's files to the
workers, so that with 16 files one of two workers would get everything (huggingface/datasets#8669)."""
ROWS_IN_A_GROUP = 1000
MEAN_CHARACTERS = 3000
VOCAB_SIZE = 50_000
TOKENIZER_BYTES = 20_000_000
DESCRIPTION = "material.json"


def make(root: Path, megabytes: int) -> dict[str, Any]:
    """Write the data set and the tokenizers below `root`, unless they are there, and describe them."""
    description = root / DESCRIPTION
    if description.exists() and (facts := json.loads(description.read_text()))["megabytes"] == megabytes:
        return dict(facts)
    description.unlink(missing_ok=True)
    folder = root / "datasets" / NAME / "data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writers = [
        pq.ParquetWriter(folder / f"train-{index:05}-of-{FILES:05}.parquet", COLUMNS, compression="snappy")
        for index in range(FILES)
    ]
    groups: list[list[str]] = [[] for _ in range(FILES)]
    count = size = 0
    for text in documents():
        group = groups[count % FILES]
        group.append(text)
        count, size = count + 1, size + len(text.encode())
        if len(group) == ROWS_IN_A_GROUP:
            _write(writers[(count - 1) % FILES], group)
        if size >= megabytes * 1_000_000:
            break
    else:
        raise SystemExit(f"this machine has {size // 1_000_000} MB of sources and texts: --megabytes asks for more")
    for writer, group in zip(writers, groups, strict=True):
        if group:
            _write(writer, group)
        writer.close()
    _make_tokenizers(root, folder)
    tokens = _tokens(Setting(root, root / "scratch", None))
    facts = {"megabytes": megabytes, "documents": count, "text_bytes": size, "tokens": tokens}
    description.write_text(json.dumps(facts))
    return facts


def documents(folders: Iterable[Path] = (), suffixes: Iterable[str] = ()) -> Iterator[str]:
    """Yield sources and texts in random order, cut at blank lines into documents of a web page's length.

    `folders` are read beside those of every machine, and files that end with `suffixes` beside the usual ones.
    """
    lengths = random.Random(0)
    for path in _sources(folders, SUFFIXES.union(suffixes)):
        length, piece = lengths.lognormvariate(0, 1) * MEAN_CHARACTERS / 1.65, ""
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= length:
                yield piece.strip()
                length, piece = lengths.lognormvariate(0, 1) * MEAN_CHARACTERS / 1.65, ""
        if piece.strip():
            yield piece.strip()


def _sources(folders: Iterable[Path], suffixes: set[str]) -> Iterator[Path]:
    cargo = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "registry" / "src"
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(cargo), "/usr/share/doc"}
    roots.update(str(folder) for folder in folders)
    paths = [path for root in roots for path in Path(root).rglob("*") if path.suffix in suffixes]
    random.Random(0).shuffle(paths := sorted(set(paths)))
    for path in paths:
        try:
            if path.stat().st_size <= LARGEST_SOURCE:
                path.read_text(encoding="utf-8")
                yield path
        except (OSError, UnicodeDecodeError):
            continue


def _write(writer: pq.ParquetWriter, group: list[str]) -> None:
    writer.write_table(pa.Table.from_pylist([row(text, "bench") for text in group], schema=COLUMNS))
    group.clear()


def _make_tokenizers(root: Path, folder: Path) -> None:
    """Train a tokenizer; a copy with an empty normaliser gives the same ids, but by the `tokenizers` library."""
    texts = (text for path in sorted(folder.iterdir()) for text in pq.read_table(path)["text"].to_pylist())
    source = {"name": NAME, "text_column": "text"}
    request = tokenizer.Request(
        VOCAB_SIZE, list(tokenizer.SPECIAL_TOKENS), source, 10**9, seed=None, max_bytes=TOKENIZER_BYTES
    )
    with reading() as watch:
        ready = tokenizer.train(root / "tokenizer", request, texts, watch)
    content = json.loads(ready.path.read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    (root / "tokenizer" / "library.json").write_text(json.dumps(content), encoding="utf-8")


def _tokens(setting: Setting) -> int:
    """Return the tokens of an epoch, the same for every contender, with an end-of-text after each document."""
    run = RunConfig.load(config(setting), overrides=["scheduler.total_steps=null", "scheduler.total_epochs=1"])
    return sum(int((targets >= 0).sum()) for _, targets in TokenStream(run))
