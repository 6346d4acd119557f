"""FineWeb's layout in small: its configs, folders and columns, with text that every Python has."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CARD = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: CC-MAIN-2013-20
  data_files:
  - split: train
    path: data/CC-MAIN-2013-20/*
- config_name: CC-MAIN-2014-10
  data_files:
  - split: train
    path: data/CC-MAIN-2014-10/*
---
# FineWeb, in small
"""
COLUMNS = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
    ]
)
FILES = {
    "data/CC-MAIN-2013-20/000_00000.parquet": "CC-MAIN-2013-20",
    "data/CC-MAIN-2013-20/000_00001.parquet": "CC-MAIN-2013-20",
    "data/CC-MAIN-2014-10/000_00000.parquet": "CC-MAIN-2014-10",
    "sample/10BT/000_00000.parquet": "CC-MAIN-2013-20",
    "sample/10BT/001_00000.parquet": "CC-MAIN-2014-10",
}


def documents(mean_characters: int = 1500) -> Iterator[str]:
    """Yield pieces of the standard library's sources, cut at blank lines, about FineWeb's page length."""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        piece = ""
        for paragraph in source.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= mean_characters:
                yield piece.strip()
                piece = ""


def row(text: str, dump: str) -> dict[str, object]:
    """Return a document with FineWeb's other columns."""
    digest = hashlib.md5(text.encode()).hexdigest()
    return {
        "text": text, "id": f"<urn:uuid:{digest}>", "dump": dump, "url": f"https://example.org/{digest}",
        "date": "2013-05-18T05:48:54Z", "file_path": f"s3://commoncrawl/{digest}.warc.gz", "language": "en",
        "language_score": 0.9, "token_count": len(text) // 4,
    }  # fmt: skip


def write_fineweb(
    root: Path, name: str = "HuggingFaceFW/fineweb", documents_per_file: int = 240, row_group: int = 40
) -> Path:
    """Write the data set `name` below `root` (see `FakeHub`) and return its folder."""
    folder = root / "datasets" / name
    texts = list(documents())
    random.Random(0).shuffle(texts)
    for index, (path, dump) in enumerate(FILES.items()):
        start = index * documents_per_file
        rows = [row(texts[(start + offset) % len(texts)], dump) for offset in range(documents_per_file)]
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows, schema=COLUMNS)
        pq.write_table(table, target, row_group_size=row_group, compression="snappy")
    (folder / "README.md").write_text(CARD)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs diff=lfs merge=lfs -text\n")
    return folder
