"""Ways to damage the files of a checkpoint: flipped, cut, exchanged, missing, or no longer regular files."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Damage:
    """A change of a folder's files: its kind, the names of the files, what it does to them, and how it is done."""

    kind: str
    names: tuple[str, ...]
    what: str
    apply: Callable[[Path], None]
    blamed: tuple[str, ...] = ()
    """The files of which a message names one, where they are not those that were changed."""

    def __str__(self) -> str:
        names = " and ".join(self.names) if len(self.names) < 3 else "every file"
        return f"{self.kind}: {names}, {self.what}"


@dataclass(frozen=True)
class StoredFolder:
    """A folder with the contents of its files, so that damage can be repaired."""

    path: Path
    contents: dict[str, bytes] = field(repr=False)

    @classmethod
    def of(cls, path: Path) -> StoredFolder:
        files = sorted(file for file in path.iterdir() if file.is_file())
        return cls(path, {file.name: file.read_bytes() for file in files})

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Damage the folder until the end of the block."""
        try:
            damage.apply(self.path)
            yield
        finally:
            for name in damage.names:
                remove(self.path / name)
                if name in self.contents:
                    (self.path / name).write_bytes(self.contents[name])

    def metadata(self, name: str) -> int:
        """Return how many of a file's first bytes are not numbers of tensors."""
        content = self.contents[name]
        if not name.endswith(".safetensors"):
            return len(content)
        (header,) = struct.unpack_from("<Q", content)
        return 8 + int(header)


def remove(path: Path) -> None:
    """Remove whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    """Return what puts a file with this content in the place of a folder's file."""

    return put(name, lambda path: path.write_bytes(content))


def put(name: str, create: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what removes a folder's file and lets `create` make something else in its place."""

    def apply(folder: Path) -> None:
        remove(folder / name)
        create(folder / name)

    return apply


def flip(name: str, position: int, mask: int) -> Callable[[Path], None]:
    """Return what flips the bits of `mask` in a byte of a folder's file."""

    def apply(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ mask]))

    return apply


def flipped_bytes(folder: StoredFolder, chance: random.Random, every: int = 1) -> Iterator[Damage]:
    """Flip bits of every byte that is no number of a tensor; with `every` above 1, of one in so many."""
    for name in folder.contents:
        for position in range(chance.randrange(every), folder.metadata(name), every):
            mask = chance.randrange(1, 256)
            what = f"byte {position} ^ {mask:#04x}"
            yield Damage(f"flipped byte of {name}", (name,), what, flip(name, position, mask))


def flipped_payload_bits(folder: StoredFolder, chance: random.Random, count: int) -> Iterator[Damage]:
    """Flip single bits of tensors, spread over the files by their sizes."""
    names = [name for name in folder.contents if name.endswith(".safetensors")]
    sizes = [len(folder.contents[name]) - folder.metadata(name) for name in names]
    for name in chance.choices(names, sizes, k=count):
        position = chance.randrange(folder.metadata(name), len(folder.contents[name]))
        bit = chance.randrange(8)
        yield Damage(
            "flipped payload bit", (name,), f"bit {bit} of byte {position}", flip(name, position, 1 << bit)
        )  # fmt: skip


def resized(folder: StoredFolder, chance: random.Random, count: int) -> Iterator[Damage]:
    """Cut files at `count` places and extend them a quarter as often."""
    for index in range(count):
        name = chance.choice(list(folder.contents))
        length = chance.randrange(len(folder.contents[name]))
        yield Damage("truncated", (name,), f"cut to {length} bytes", overwrite(name, folder.contents[name][:length]))
        if index % 4 == 0:
            added = chance.choice([b"\0", b"\n", chance.randbytes(chance.randrange(1, 5000))])
            content = folder.contents[name] + added
            yield Damage("extended", (name,), f"{len(added)} bytes longer", overwrite(name, content))


def exchanged(folder: StoredFolder) -> Iterator[Damage]:
    """Exchange each two files."""
    for one, other in combinations(folder.contents, 2):

        def apply(path: Path, one: str = one, other: str = other) -> None:
            (path / one).rename(path / "exchanged")
            (path / other).rename(path / one)
            (path / "exchanged").rename(path / other)

        yield Damage("exchanged", (one, other), "one in place of the other", apply)


def taken_from(folder: StoredFolder, other: Path, kind: str) -> Iterator[Damage]:
    """Put in each file of another checkpoint that differs. A manifest of another one blames the other files."""
    contents = {name: (other / name).read_bytes() for name in folder.contents}
    differing = tuple(name for name, content in folder.contents.items() if contents[name] != content)
    for name in differing:
        blamed = differing if name == MANIFEST else ()
        yield Damage(kind, (name,), f"that of {other}", overwrite(name, contents[name]), blamed)


def irregular(folder: StoredFolder, elsewhere: Path) -> Iterator[Damage]:
    """Put in place of each file nothing, and everything that is not the regular file that was written.

    Args:
        folder: The folder to damage.
        elsewhere: A regular file with other content.
    """
    replacements: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "empty": lambda path: path.write_bytes(b""),
        "directory": Path.mkdir,
        "named pipe": os.mkfifo,
        "link to another file": lambda path: path.symlink_to(elsewhere),
        "link to nothing": lambda path: path.symlink_to("nothing"),
        "link to itself": lambda path: path.symlink_to(path.name),
        "link to its directory": lambda path: path.symlink_to("."),
        "endless device": lambda path: path.symlink_to("/dev/zero"),
        "empty device": lambda path: path.symlink_to(os.devnull),
        "zeros of the same size": lambda path: path.write_bytes(bytes(len(folder.contents[path.name]))),
    }
    for name in folder.contents:
        for kind, create in replacements.items():
            yield Damage(kind, (name,), "in its place", put(name, create))


def replaced(folder: StoredFolder, other: Path, kind: str) -> Damage:
    """Put a whole other checkpoint in the folder's place."""
    contents = {file.name: file.read_bytes() for file in other.iterdir()}

    def apply(path: Path) -> None:
        for name, content in contents.items():
            (path / name).write_bytes(content)

    return Damage(kind, tuple(contents), f"all of {other}", apply)
