"""Reads files that users name, regular ones only: opening a named pipe would block, and a device may never end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.command_error import CommandError, reason

LARGEST = 1 << 30
"""Bytes of a file that is read whole, such as a config or a tokenizer, at most."""


def check_regular(path: Path) -> None:
    """Raise an `OSError` if there is something that is neither a file nor a folder."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        kind = "a named pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        raise OSError(f"{path} is {kind}, not a regular file")


def read_text(path: Path) -> str:
    """Return the text of a file, without the byte order mark that some editors put first."""
    return read_bytes(path).decode("utf-8-sig")


def read_bytes(path: Path) -> bytes:
    """Return what is in a file of at most `LARGEST` bytes, or raise an `OSError`."""
    check_regular(path)
    if (size := path.stat().st_size) > LARGEST:
        raise OSError(f"{path} has {size:,} bytes, and such a file has at most {LARGEST:,}")
    return path.read_bytes()


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, or raise a `ValueError`, also for one that nests too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none that can be read."""
    with suppress(OSError, ValueError):
        value = parse_json(read_text(path))
        return value if isinstance(value, dict) else {}
    return {}


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn an error of reading a file in the block, or one of what is in it, into a `CommandError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"cannot read {what}: {reason(error)}") from error


POINTERS = ("latest", "best")
"""Names beside the checkpoints of a run that point to one of them."""


def read_pointer(path: Path) -> str:
    """Return the name of the checkpoint that `latest` or `best` points to: a link, or a text file of earlier versions.

    Raises:
        OSError: There is neither.
    """
    return str(path.readlink()) if path.is_symlink() else read_text(path).strip()


def followed(path: Path) -> Path:
    """Return the checkpoint that `latest` or `best` points to at this moment; any other path as it is."""
    is_pointer = path.name in POINTERS and (path.is_symlink() or path.is_file())
    return path.with_name(read_pointer(path)) if is_pointer else path
