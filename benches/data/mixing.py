"""How well documents are mixed, and which are lost or repeated on resume: ours against `datasets`' shuffle buffer.

Every document is its own number in sixteen characters and the tokenizer knows bytes only, so that a sequence of sixteen
tokens is one document and both orders can be read from what is delivered. Both get the same files, the same
number of documents to shuffle among, and one epoch. Prints JSON lines; takes seconds and needs no network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from orchestrator import RunConfig, TokenStream
from ours import config
from setting import NAME, Setting
from tokenizers import Tokenizer, models, pre_tokenizers

CHARACTERS = 15
"""Characters per document; end-of-text is its sixteenth token."""
ROWS_PER_ROW_GROUP = 500
BATCH = 64
PERCENTILES = (5, 25, 50, 75, 95)
Take = Callable[[int, Any], tuple[np.ndarray, Any]]
"""Takes a number of batches and a state to resume from (or none). Returns the numbers of the documents in these
batches, fewer at the end of the epoch, and the state after them.
"""


def write_documents(root: Path, files: int, documents_per_file: int) -> None:
    folder = root / "datasets" / NAME / "data"
    folder.mkdir(parents=True)
    for file in range(files):
        numbers = range(file * documents_per_file, (file + 1) * documents_per_file)
        table = pa.table({"text": [f"{number:0{CHARACTERS}}" for number in numbers]})
        pq.write_table(table, folder / f"train-{file:05}-of-{files:05}.parquet", row_group_size=ROWS_PER_ROW_GROUP)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))


def ours(setting: Setting) -> Take:
    path = config(setting)
    tokenizer = Tokenizer.from_file(str(setting.root / "tokenizer" / "tokenizer.json"))
    digits = np.zeros(tokenizer.get_vocab_size(), np.int64)
    digits[[tokenizer.token_to_id(str(digit)) for digit in range(10)]] = range(10)
    powers = 10 ** np.arange(CHARACTERS - 1, -1, -1)

    def take(batches: int, state: Any) -> tuple[np.ndarray, Any]:
        stream = TokenStream(RunConfig.load(path), state=state)
        numbers = [digits[targets[:, :-1]] @ powers for _, targets in itertools.islice(stream, batches)]
        return np.concatenate(numbers), stream.state()

    return take


def theirs(setting: Setting) -> Take:
    def take(batches: int, state: Any) -> tuple[np.ndarray, Any]:
        files = [str(path) for path in setting.files()]
        documents = load_dataset("parquet", data_files=files, split="train", streaming=True)
        documents = documents.shuffle(seed=setting.seed, buffer_size=setting.shuffle_buffer_size)
        if state is not None:
            documents.load_state_dict(state)
        count = batches * setting.sequences
        numbers = np.fromiter((int(row["text"]) for row in itertools.islice(documents, count)), dtype=np.int64)
        return numbers, documents.state_dict()

    return take


def mixing(order: np.ndarray, documents_per_file: int) -> dict[str, Any]:
    """Return measures of an order; `order[i]` is the number in the listing of the i-th document delivered."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    distances = np.abs(np.diff(position.reshape(-1, documents_per_file), axis=1)).ravel()
    file = order // documents_per_file
    whole = file[: len(file) // BATCH * BATCH].reshape(-1, BATCH)
    distinct = [len(np.unique(batch)) for batch in whole]
    return {
        "neighbours_apart": {f"p{p}": int(np.percentile(distances, p)) for p in PERCENTILES},
        "neighbours_in_one_batch": float(np.mean(distances < BATCH)),
        "spearman_with_listing": float(np.corrcoef(order, np.arange(len(order)))[0, 1]),
        "files_in_a_batch": {f"p{p}": int(np.percentile(distinct, p)) for p in PERCENTILES},
    }


def resumed(take: Take, batches: int, documents: int) -> dict[str, int]:
    """Count the documents of an epoch that were never delivered, and those delivered again, with one resume."""
    before, state = take(batches // 2, None)
    after, _ = take(batches - batches // 2, state)
    counts = np.bincount(np.concatenate([before, after]), minlength=documents)
    return {"lost": int((counts == 0).sum()), "repeated": int((counts > 1).sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--documents", type=int, default=10_240, help="in each file; all together a multiple of 64")
    parser.add_argument("--shuffle-buffer", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_documents(root, arguments.files, arguments.documents)
        documents = arguments.files * arguments.documents
        for name, contender in (("ours", ours), ("datasets", theirs)):
            setting = Setting(
                root, root / name, None, sequence_length=CHARACTERS + 1, sequences=BATCH,
                shuffle_buffer_size=arguments.shuffle_buffer,
            )  # fmt: skip
            take = contender(setting)
            order, _ = take(documents // BATCH, None)
            assert len(np.unique(order)) == documents
            after_resume = resumed(take, documents // BATCH, documents)
            row = {"contender": name, "documents": documents, **mixing(order, arguments.documents)}
            print(json.dumps({**row, "after_one_resume": after_resume}), flush=True)


if __name__ == "__main__":
    main()
