"""What a disk may hold after a power loss: a model of what is durable, fed with the recorded calls of a command.

POSIX promises little. A file's content is durable up to the file's last fsync, the entries of a folder up to the
folder's last fsync. Of what came later any part may be there: each write whole, a prefix of it, zeros in its place, or
nothing; each entry created, renamed or removed, or not, in any order. Real file systems promise more.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from file_operations import Operation

KEPT, LOST, ANY = 1.0, 0.0, 0.5
"""Chances that a change which is not durable survives."""
TORN = 0.5
"""Chance that a write which does not survive leaves something."""

Contents = dict[str, "bytes | Path | None"]
"""The tree of a folder by path: a file's content, a link's target, None for a folder."""


@dataclass
class File:
    """A file: its content, the content that is durable, and the changes since."""

    content: bytes = b""
    durable: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Offset and bytes of a write, or the length that the file was cut to and None."""

    def change(self, offset: int, data: bytes | None) -> None:
        self.content = changed(self.content, offset, data)
        self.changes.append((offset, data))

    def sync(self) -> None:
        self.durable, self.changes = self.content, []

    def after_power_loss(self, survival: float, chance: random.Random) -> bytes:
        content = self.durable
        for offset, data in self.changes:
            if chance.random() < survival:
                content = changed(content, offset, data)
            elif data and survival == ANY and chance.random() < TORN:
                torn = data[: chance.randrange(len(data))] if chance.random() < TORN else bytes(len(data))
                content = changed(content, offset, torn)
        return content


def changed(content: bytes, offset: int, data: bytes | None) -> bytes:
    """Return a file's content after a write, which may leave a gap of zeros before it, or after a cut."""
    if data is None:
        return content[:offset].ljust(offset, b"\0")
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


@dataclass
class Folder:
    """A folder: its entries, those that are durable, and the changes since, each of one or two entries."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, entries: dict[str, Node | None]) -> None:
        self.entries = with_entries(self.entries, entries)
        self.changes.append(entries)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.entries), []

    def after_power_loss(self, survival: float, chance: random.Random) -> dict[str, Node]:
        entries = self.durable
        for change in self.changes:
            if chance.random() < survival:
                entries = with_entries(entries, change)
        return entries


Node = File | Folder | Path
"""A file, a folder, or the target of a link."""


def with_entries(entries: dict[str, Node], change: dict[str, Node | None]) -> dict[str, Node]:
    """Return the entries of a folder after a change; None removes one."""
    return {name: node for name, node in (entries | change).items() if node is not None}


@dataclass
class Disk:
    """The folder `root` while a command changes it. All that is there at first is durable."""

    root: Path
    folder: Folder

    @classmethod
    def of(cls, base: Path, root: Path) -> Disk:
        """Return the disk on which `root` holds what `base` does."""
        return cls(root, _read(base))

    def apply(self, operation: Operation) -> None:
        """Do what a call did."""
        name, paths = operation.name, [path for path in operation.paths if path.is_relative_to(self.root)]
        if not paths or len(paths) < len(operation.paths):
            return
        node = self._find(paths[0])
        match name, node:
            case "open", None:
                self._enter(paths[0], File())
            case (("write" | "cut"), File()):
                node.change(operation.offset, operation.data)
            case "sync", File() | Folder():
                node.sync()
            case "mkdir", None:
                self._enter(paths[0], Folder())
            case "symlink", None:
                self._enter(paths[0], Path(operation.target))
            case "remove", _:
                self._enter(paths[0], None)
            case (("rename" | "exchange"), (File() | Folder() | Path())):
                self._rename(paths[0], paths[1], node, is_exchange=name == "exchange")
            case "open", File():
                pass
            case _:
                raise AssertionError(f"{operation} on {node and type(node).__name__}")

    def after_power_loss(self, survival: float, chance: random.Random) -> Contents:
        """Return what the disk may hold if the power is lost here."""
        return dict(_contents(self.folder, PurePath(), survival, chance))

    def _find(self, path: Path) -> Node | None:
        node: Node | None = self.folder
        for part in path.relative_to(self.root).parts:
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def _parent(self, path: Path) -> Folder:
        parent = self._find(path.parent)
        assert isinstance(parent, Folder), path
        return parent

    def _enter(self, path: Path, node: Node | None) -> None:
        self._parent(path).change({path.name: node})

    def _rename(self, source: Path, target: Path, node: Node, is_exchange: bool) -> None:
        before = self._find(target) if is_exchange else None
        if source.parent == target.parent:
            self._parent(source).change({source.name: before, target.name: node})
        else:
            self._enter(target, node)
            self._enter(source, before)


def _read(base: Path) -> Folder:
    """Return a folder of the disk as a durable one."""
    folder = Folder()
    for path in base.iterdir():
        if path.is_symlink():
            folder.entries[path.name] = path.readlink()
        else:
            folder.entries[path.name] = _read(path) if path.is_dir() else File(path.read_bytes(), path.read_bytes())
    folder.sync()
    return folder


def _contents(
    folder: Folder, path: PurePath, survival: float, chance: random.Random
) -> Iterator[tuple[str, bytes | Path | None]]:
    for name, node in sorted(folder.after_power_loss(survival, chance).items()):
        place = path / name
        if isinstance(node, Folder):
            yield str(place), None
            yield from _contents(node, place, survival, chance)
        else:
            yield str(place), node.after_power_loss(survival, chance) if isinstance(node, File) else node


def write_out(contents: Contents, root: Path) -> None:
    """Make `root` a folder with these contents."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in contents.items():
        path = root / name
        if content is None:
            path.mkdir()
        elif isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


@dataclass(frozen=True)
class PowerLoss:
    """A power loss after the first `calls` recorded calls, and what it leaves."""

    calls: int
    survival: float
    contents: Contents
    announced: str | None
    """The last checkpoint of which the command has said that it is saved."""


def power_losses(
    base: Path, root: Path, operations: Sequence[Operation], chance: random.Random, survivals: Sequence[float]
) -> Iterator[PowerLoss]:
    """Cut the power after every call, once with each chance that a change survives; yields what a disk holds once."""
    disk, announced, seen = Disk.of(base, root), None, set()
    for calls, operation in enumerate(operations, 1):
        disk.apply(operation)
        if operation.name == "print" and operation.data and operation.data.startswith(b"checkpoint "):
            announced = Path(operation.data.decode().split()[1]).name
        for survival in survivals:
            contents = disk.after_power_loss(survival, chance)
            digest = (announced, _digest(contents))
            if digest not in seen:
                seen.add(digest)
                yield PowerLoss(calls, survival, contents, announced)


def _digest(contents: Contents) -> bytes:
    hashed = hashlib.sha256()
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else b""
        hashed.update(f"{name} {len(data)} {'' if isinstance(content, bytes) else content}".encode() + data)
    return hashed.digest()


def broken_promise(loss: PowerLoss, checkpoints: str) -> str | None:
    """Return what is wrong with the announced checkpoint in a folder: its files must be those of its manifest."""
    if loss.announced is None:
        return None
    folder = f"{checkpoints}/{loss.announced}"
    manifest = loss.contents.get(f"{folder}/MANIFEST.json")
    if not isinstance(manifest, bytes):
        return f"{folder} was announced and has no manifest"
    try:
        recorded_files = json.loads(manifest)["files"]
    except ValueError:
        return f"{folder} was announced and its manifest is damaged"
    for name, record in recorded_files.items():
        content = loss.contents.get(f"{folder}/{name}")
        if not isinstance(content, bytes) or hashlib.sha256(content).hexdigest() != record["sha256"]:
            return f"{folder} was announced and its {name} is damaged"
    return None
