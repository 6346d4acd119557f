"""The most memory that a stream takes, over files of one large row group each, beside the bound that the guide tells.

Documents of a web page's length and of a megabyte, the default window and one that only its 64 MiB of text bound, from
this disk and from a Hub on loopback. Each measurement is a process of its own; what the program takes without a window
is measured first and taken off. Prints one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import material
import pyarrow as pa
import pyarrow.parquet as pq
from processes import fake_hub
from setting import NAME, Setting

OPEN_SHARDS = 16
WINDOW_BYTES = 64 << 20
BLOCK_BYTES = 8 << 20
DECODED_BYTES = 2 << 20
ROWS_PER_PAGE = 1024
"""Rows of a page at least, whatever their size, as pyarrow writes."""
ENCODER_BYTES = 100 << 20
CASES = ((3_000, 8192), (3_000, 65_536), (1_000_000, 8192))
"""Bytes of a document, and `data.shuffle_buffer_size`."""


def make(root: Path, document_bytes: int, megabytes: int) -> None:
    """Write `OPEN_SHARDS` files below `root`, each of one row group."""
    folder = root / "datasets" / NAME / "data"
    folder.mkdir(parents=True)
    texts = cycle(_pieces(document_bytes, 50_000_000))
    documents = megabytes * 1_000_000 // OPEN_SHARDS // document_bytes
    for file in range(OPEN_SHARDS):
        table = pa.table({"text": list(islice(texts, documents))})
        pq.write_table(table, folder / f"train-{file:05}-of-{OPEN_SHARDS:05}.parquet", row_group_size=documents)


def _pieces(document_bytes: int, most: int) -> list[str]:
    pieces, text, total = list[str](), "", 0
    for source in material.documents():
        text += source
        while len(text) >= document_bytes and total < most:
            pieces.append(text[:document_bytes])
            text, total = text[document_bytes:], total + document_bytes
        if total >= most:
            break
    return pieces


def stream(setting: Setting, batches: int, address: str | None, answer: Any) -> None:
    """Send the peak memory of `batches` batches above that of a nearly empty stream, and the latter, in bytes."""
    if address:
        os.environ["HF_ENDPOINT"] = address
    from orchestrator import RunConfig, TokenStream
    from ours import config

    def peak(shuffle_buffer_size: int, batches: int) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        path = config(replace(setting, shuffle_buffer_size=shuffle_buffer_size))
        for _ in islice(TokenStream(RunConfig.load(path)), batches):
            pass
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) << 10

    base = peak(1, 1)
    answer.send((peak(setting.shuffle_buffer_size, batches) - base, base))


def bound(document_bytes: int, rows: int, setting: Setting, tokens_per_byte: float) -> int:
    """Return the bound on the memory in bytes, as the `dataset` crate documents it, for row groups of `rows` rows."""
    text = min(setting.shuffle_buffer_size * document_bytes, WINDOW_BYTES + OPEN_SHARDS * document_bytes)
    tokens = int(4 * tokens_per_byte * text)
    open_shard = BLOCK_BYTES + min(rows, ROWS_PER_PAGE) * document_bytes + DECODED_BYTES
    return tokens + max(text + tokens, 2 * tokens) + OPEN_SHARDS * open_shard + setting.workers * ENCODER_BYTES


def measured(setting: Setting, batches: int, address: str | None) -> tuple[int, int]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=stream, args=(setting, batches, address, there))
    process.start()
    there.close()
    peak, base = here.recv()
    process.join()
    return peak, base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--root", type=Path, required=True, help="material of run.py")
    arguments = parser.parse_args()
    description = json.loads((arguments.root / material.DESCRIPTION).read_text())
    tokens_per_byte = description["tokens"] / description["text_bytes"]
    for document_bytes, shuffle_buffer_size in CASES:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "tokenizer").symlink_to(arguments.root.resolve() / "tokenizer")
            make(root, document_bytes, arguments.megabytes)
            with fake_hub(root, 0) as address:
                for source, hub in (("local", None), ("hub", NAME)):
                    setting = Setting(root, root / source, hub, shuffle_buffer_size=shuffle_buffer_size)
                    tokens = arguments.megabytes * 1_000_000 * tokens_per_byte
                    batches = int(tokens / setting.sequences / setting.sequence_length)
                    peak, base = measured(setting, batches, address if hub else None)
                    rows = arguments.megabytes * 1_000_000 // OPEN_SHARDS // document_bytes
                    most = bound(document_bytes, rows, setting, tokens_per_byte)
                    row = {
                        "source": source, "document_bytes": document_bytes, "shuffle_buffer_size": shuffle_buffer_size,
                        "row_group_megabytes": arguments.megabytes // OPEN_SHARDS, "bound_mebibytes": most >> 20,
                        "peak_mebibytes": peak >> 20, "program_mebibytes": base >> 20,
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
