"""The text of the quality bench: Python sources of the hash-locked oracle environment, the same on every machine.

They are those of packages whose version does not depend on Python's. One JSON line per file with its text, in the order
of the SHA-256 of the paths: every part of the text, however short, is drawn from all packages. Files whose hash is
divisible by 100 are held out. The hash of both files is recorded beside them, and in every result.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

HELD_OUT = 100
"""The average number of files of which one is held out."""
PACKAGES = ("huggingface_hub", "mpmath", "pygments", "sympy", "torch", "torchgen", "transformers")


def prepare(folder: Path) -> str:
    """Write train.jsonl and validation.jsonl unless they are there; return the first 16 digits of their SHA-256."""
    recorded = folder / "text.sha256"
    if recorded.exists():
        return recorded.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    packages = Path(sysconfig.get_path("purelib"))
    digest = hashlib.sha256()
    with (folder / "train.jsonl").open("w") as train, (folder / "validation.jsonl").open("w") as validation:
        paths = [path for package in PACKAGES for path in (packages / package).rglob("*.py")]
        for number, path in sorted((path_hash(path.relative_to(packages)), path) for path in paths):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few test files of other encodings
            if not text:
                continue
            line = json.dumps({"text": text}) + "\n"
            digest.update(line.encode())
            (validation if number % HELD_OUT == 0 else train).write(line)
    recorded.write_text(digest.hexdigest()[:16])
    return recorded.read_text()


def path_hash(path: Path) -> int:
    """Return the SHA-256 of a relative path, which is the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest(), "big")
