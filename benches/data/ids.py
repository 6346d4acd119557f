"""Ids of our stream and of the Python package `tokenizers`, document by document, for the kinds that open models have.

    PYTHONPATH=tests python benches/data/ids.py --kind llama_3 --megabytes 100
    PYTHONPATH=tests python benches/data/ids.py --kind gpt_2 --megabytes 1000 --folder ~/.rustup --suffix .html

Trains a tokenizer of that kind on text of this machine, reads the text as a run does, and compares what each document
became. `gpt_2` is the kind that `orchestrate` trains and the fast encoder reads; the library encodes the others. Prints
one JSON line; ends with 1 if a document differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny_tokenizers
import yaml
from material import documents
from orchestrator import RunConfig, TokenStream
from ours import MODEL
from tokenizers import Tokenizer

SEQUENCE_LENGTH = 1 << 20
"""More tokens than a shuffle window of 64 documents has, so that no document is cut."""
VOCAB_SIZE = 32_000
TRAINING_BYTES = 10_000_000
BATCH = 1000
LONGEST_DOCUMENT = 20_000
"""Characters of a document at most; longer ones, such as pages of HTML, are cut."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tiny_tokenizers.KINDS, default="llama_3")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--folder", type=Path, action="append", default=[], help="read its texts too")
    parser.add_argument("--suffix", action="append", default=[], help="read files that end so too, as .html")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        count, size = write_text(root / "text.jsonl", pieces(flags.folder, flags.suffix), flags.megabytes * 1_000_000)
        tokenizer = tiny_tokenizers.train(flags.kind, sample(root / "text.jsonl"), VOCAB_SIZE)
        config = write_config(root, tiny_tokenizers.write(tokenizer, flags.kind, root / "tokenizer"))
        start = time.monotonic()
        expected = Counter(digest(ids) for ids in theirs(tokenizer, root / "text.jsonl"))
        between = time.monotonic()
        counts, tokens = Counter[bytes](), 0
        for ids in ours(config):
            counts[digest(ids)] += 1
            tokens += len(ids)
        end = time.monotonic()
    row = {
        "kind": flags.kind, "documents": count, "megabytes": size / 1e6, "tokens": tokens,
        "different": max((counts - expected).total(), (expected - counts).total()),
        "tokenizers_mb_s": size / 1e6 / (between - start), "ours_mb_s": size / 1e6 / (end - between),
    }  # fmt: skip
    print(json.dumps(row))
    return int(row["different"] > 0)


def pieces(folders: list[Path], suffixes: list[str]) -> Iterator[str]:
    for text in documents(folders, suffixes):
        yield from (text[start : start + LONGEST_DOCUMENT] for start in range(0, len(text), LONGEST_DOCUMENT))


def write_text(path: Path, texts: Iterator[str], size_limit: int) -> tuple[int, int]:
    count = size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            count, size = count + 1, size + len(text.encode())
            if size >= size_limit:
                return count, size
    raise SystemExit(f"this machine has {size // 1_000_000} MB of sources and texts: --megabytes asks for more")


def texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def sample(path: Path) -> Iterator[str]:
    size = 0
    for text in texts(path):
        yield text
        size += len(text)
        if size >= TRAINING_BYTES:
            return


def write_config(root: Path, tokenizer: Path) -> Path:
    text = str(root / "text.jsonl")
    values = {
        "model": MODEL | {"max_position_embeddings": SEQUENCE_LENGTH},
        "tokenizer": {"tokenizer_json": str(tokenizer)},
        "data": {
            "train_shards": [text], "validation_shards": [text], "sequence_length": SEQUENCE_LENGTH,
            "sequences_per_step": 1, "batch_size": 1, "shuffle_buffer_size": 64,
        },
        "scheduler": {"strategy": "constant", "total_epochs": 1, "warmup_steps": 0},
    }  # fmt: skip
    config = root / "training.yaml"
    config.write_text(yaml.safe_dump(values))
    return config


def theirs(tokenizer: Tokenizer, path: Path) -> Iterator[np.ndarray]:
    tokenizer.encode_special_tokens = True
    batch: list[str] = []
    for text in texts(path):
        batch.append(text)
        if len(batch) == BATCH:
            yield from (np.array(encoding.ids) for encoding in tokenizer.encode_batch_fast(batch))
            batch.clear()
    yield from (np.array(encoding.ids) for encoding in tokenizer.encode_batch_fast(batch))


def ours(config: Path) -> Iterator[np.ndarray]:
    for _, targets in TokenStream(RunConfig.load(config)):
        row = targets[0][targets[0] >= 0]
        start = 0
        for end in np.flatnonzero(row == row[-1]):
            yield row[start:end]
            start = end + 1


def digest(ids: np.ndarray) -> bytes:
    return hashlib.sha256(ids.astype(np.int32).tobytes()).digest()


if __name__ == "__main__":
    raise SystemExit(main())
