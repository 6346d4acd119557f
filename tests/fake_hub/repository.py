"""A repository on disk as the Hub describes it: commit, files, tree entries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

LARGE_FILE_SUFFIXES = (".parquet", ".safetensors", ".zst", ".gz")


@lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sha256(path: Path) -> str:
    """Return the checksum of a file, remembered until the file changes."""
    status = path.stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Repository:
    """`root/datasets/owner/name` or `root/models/owner/name`."""

    root: Path
    kind: str
    name: str

    @property
    def folder(self) -> Path:
        return self.root / self.kind / self.name

    def exists(self) -> bool:
        return self.folder.is_dir()

    def files(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def commit(self) -> str:
        """Return a 40-digit commit that changes when any file does."""
        digest = hashlib.sha1(f"{self.kind}/{self.name}".encode())
        for name in self.files():
            digest.update(f"{name}\0{sha256(self.folder / name)}\n".encode())
        return digest.hexdigest()

    @staticmethod
    def is_large(name: str) -> bool:
        """Whether the Hub keeps this file in large-file storage, behind a redirect."""
        return name.endswith(LARGE_FILE_SUFFIXES)

    def entry(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if path.is_dir():
            oid = hashlib.sha1(name.encode()).hexdigest()
            return {"type": "directory", "oid": oid, "size": 0, "path": name}
        size, checksum = path.stat().st_size, sha256(path)
        oid = hashlib.sha1(checksum.encode()).hexdigest()
        entry: dict[str, Any] = {"type": "file", "oid": oid, "size": size, "path": name}
        if self.is_large(name):
            entry["lfs"] = {"oid": checksum, "size": size, "pointerSize": 135}
        return entry

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """Return the entries below `folder` (`""` is the top), folders included, sorted by path."""
        prefix = f"{folder}/" if folder else ""
        files = [name for name in self.files() if name.startswith(prefix)]
        parents = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
        names = set(files) | {parent for parent in parents if parent.startswith(prefix) and parent != "."}
        if not recursive:
            names = {name for name in names if "/" not in name[len(prefix) :]}
        return [self.entry(name) for name in sorted(names)]

    def describe(self, commit: str, gated: bool, private: bool = False) -> dict[str, Any]:
        """Return the answer to `/api/datasets/<name>`."""
        return {
            "_id": commit[:24], "id": self.name, "author": self.name.split("/")[0], "sha": commit,
            "private": private, "gated": "auto" if gated else False, "disabled": False, "downloads": 1, "likes": 0,
            "tags": [], "lastModified": "2025-01-01T00:00:00.000Z", "createdAt": "2024-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": name} for name in self.files()],
        }  # fmt: skip
