"""The embedded data set `demo`: the Python standard library's sources and the docstrings of the interpreter in use.

Real text that every machine has already, written once as Parquet shards and read through the same path as any other
data set. The same interpreter writes the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from orchestrator.written_files import naming, replace

SHARDS = 4
ROWS_IN_A_GROUP = 100
LARGEST_DOCUMENT = 6_000
SHORTEST_DOCUMENT = 200
LARGEST_DATA_SET = 16_000_000
STAMP = "stamp.json"
FORMAT = 1
# Other people's packages, tests, and tables that are no text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def ensure(folder: Path) -> int:
    """Write the shards into `folder` unless they are there; return the bytes of text."""
    stamp = {"format": FORMAT, "python": sys.version}
    try:
        record = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        if {key: record[key] for key in stamp} == stamp and all((folder / name).exists() for name in record["files"]):
            return int(record["bytes"])
    except (OSError, ValueError, KeyError):
        pass
    texts = list(documents())
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    names = [_write_shard(folder, index, texts[index::SHARDS]) for index in range(SHARDS)]
    size = sum(len(text.encode()) for text in texts)
    replace(folder / STAMP, json.dumps(stamp | {"files": names, "bytes": size}, indent=2).encode() + b"\n")
    return size


def documents() -> Iterator[str]:
    """Yield the documents, mixed by a hash of their text, until the data set is large enough."""
    size = 0
    texts = (text for text in (*_sources(), *_docstrings(), *_reference()) if len(text) >= SHORTEST_DOCUMENT)
    unique = {hashlib.sha256(text.encode()).digest(): text for text in texts}
    for _, text in sorted(unique.items()):
        size += len(text.encode())
        if size > LARGEST_DATA_SET:
            return
        yield text


def _sources() -> Iterator[str]:
    """Yield each module of the standard library, long ones cut between top-level statements."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            try:
                with tokenize.open(path) as file:
                    text = file.read()
                yield from _pieces(text)
            except (OSError, SyntaxError, UnicodeError, ValueError):
                continue


def _pieces(text: str) -> Iterator[str]:
    """Cut a module into runs of whole top-level statements of about the largest size."""
    lines = text.splitlines(keepends=True)
    starts = [
        min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) for node in ast.parse(text).body
    ]
    begin = size = 0
    for start, end in zip([1, *starts[1:]], [*starts[1:], len(lines) + 1], strict=True):
        statement = sum(len(line) for line in lines[start - 1 : end - 1])
        if size and size + statement > LARGEST_DOCUMENT:
            yield "".join(lines[begin : start - 1])
            begin, size = start - 1, 0
        size += statement
    if begin < len(lines):
        yield "".join(lines[begin:])


def _docstrings() -> Iterator[str]:
    """Yield the longer docstrings of what is written in C, which no source shows."""
    for name in sorted(sys.builtin_module_names):
        if name.startswith("_"):
            continue
        module = importlib.import_module(name)
        for member, value in sorted(vars(module).items()):
            yield from _documented(f"{name}.{member}", value)


def _reference() -> Iterator[str]:
    """Yield the topics of the language reference that `help()` prints."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for _, text in sorted(topics.items()):
        yield text


def _documented(name: str, value: object) -> Iterator[str]:
    if isinstance(value, ModuleType):
        return
    text = inspect.getdoc(value) if callable(value) else None
    if text:
        yield f"{name}\n\n{text}\n"
    if isinstance(value, type):
        for member, attribute in sorted(vars(value).items()):
            if callable(attribute) and not isinstance(attribute, type):
                yield from _documented(f"{name}.{member}", attribute)


def _write_shard(folder: Path, index: int, texts: list[str]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = f"{index:03}_00000.parquet"
    sink = pa.BufferOutputStream()
    table = pa.table({"text": texts})
    pq.write_table(table, sink, row_group_size=ROWS_IN_A_GROUP, compression="zstd")
    replace(folder / name, sink.getvalue().to_pybytes())
    return name
