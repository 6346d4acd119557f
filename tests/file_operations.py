"""What a command does to files, with every byte, as strace records it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from system_calls import calls, trace

HEXADECIMAL = r"((?:\\x[0-9a-f]{2})*)"
STRING = re.compile(rf'"{HEXADECIMAL}"')
DESCRIPTOR = re.compile(rf"(\d+|AT_FDCWD)<{HEXADECIMAL}>")
RESULT = re.compile(r"\) += (\d+)")
TRACED = (
    "openat,lseek,write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "symlink,symlinkat"
)
OTHER_CHANGES = (
    "open,creat,writev,pwritev,pwritev2,truncate,fallocate,link,linkat,sendfile,copy_file_range,sync_file_range,sync,"
    "syncfs,msync"
)
"""Calls that would change files or make them durable too, and that the trainer does not make."""
REMOVALS = {"unlink", "unlinkat", "rmdir"}


@dataclass(frozen=True)
class Operation:
    """A call that succeeded: open, write, cut, sync, mkdir, symlink, remove, rename, exchange, or print (to stdout)."""

    name: str
    paths: tuple[Path, ...] = ()
    offset: int = 0
    data: bytes | None = None
    target: str = ""


def record_operations(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path
) -> list[Operation]:
    """Run a command of one process to its end; return what it did to files, in order."""
    options = ("-y", "-xx", "-s", str(1 << 24), "-e", f"trace={TRACED},{OTHER_CHANGES}")
    trace(command, folder, environment, log, *options)
    offsets: dict[str, int] = {}
    return list(_operations(log, folder, offsets))


def _operations(log: Path, folder: Path, offsets: dict[str, int]) -> Iterator[Operation]:
    """Parse a log; `offsets` are those of the open descriptors."""
    for call in calls(log):
        if not (result := RESULT.search(call.text[call.text.rfind(")") :])):
            continue
        assert call.name not in OTHER_CHANGES.split(",") or "/dev/" in call.text, f"{call.name} is not in the model"
        strings = [_decoded(text) for text in STRING.findall(call.text)]
        descriptors = [(number, Path(_decoded(path).decode())) for number, path in DESCRIPTOR.findall(call.text)]
        number, opened = descriptors[0] if descriptors else ("", folder)
        paths = tuple(opened / text.decode() for text in strings) if number in ("", "AT_FDCWD") else (opened,)
        match call.name:
            case "openat":
                yield from _opened(call.text, (opened / strings[0].decode(),))
                offsets[result[1]] = 0
            case "lseek":
                offsets[number] = int(result[1])
            case "write" if number in "012":
                yield Operation("print", data=strings[0])
            case "write":
                yield Operation("write", (opened,), offsets[number], strings[0][: int(result[1])])
                offsets[number] += int(result[1])
            case "pwrite64":
                yield Operation("write", (opened,), int(_last_number(call.text)), strings[0][: int(result[1])])
            case "ftruncate":
                yield Operation("cut", (opened,), int(_last_number(call.text)))
            case "fsync" | "fdatasync":
                yield Operation("sync", (opened,))
            case "mkdir" | "mkdirat":
                yield Operation("mkdir", paths)
            case "symlink" | "symlinkat":
                yield Operation("symlink", (folder / strings[1].decode(),), target=strings[0].decode())
            case name if name in REMOVALS:
                yield Operation("remove", (opened / strings[0].decode(),))
            case _:
                yield Operation("exchange" if "RENAME_EXCHANGE" in call.text else "rename", paths)


def _opened(text: str, paths: tuple[Path, ...]) -> Iterator[Operation]:
    if "O_CREAT" in text:
        yield Operation("open", paths)
    if "O_TRUNC" in text:
        yield Operation("cut", paths)
    assert "O_APPEND" not in text, "offsets of appending descriptors are not in the model"


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _last_number(text: str) -> str:
    """Return the last argument of a call."""
    return text[: text.rfind(")")].rpartition(", ")[2]
