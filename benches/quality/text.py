"""The text of the quality bench: Python sources of the hash-locked oracle environment, the same on every machine.

They are those of packages whose version does not depend on Python's. One JSON line per file with its text, in the order
of the paths. Files whose path's SHA-256 is divisible by 100 are held out. The hash of both files is recorded beside
them, and in every result.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

HELD_OUT = 100
"""One file in so many is held out."""
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
        for path in sorted(paths, key=lambda path: path.relative_to(packages).as_posix()):
            name = path.relative_to(packages).as_posix()
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few test files of other encodings
            if not text:
                continue
            line = json.dumps({"text": text}) + "\n"
            digest.update(line.encode())
            held_out = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % HELD_OUT == 0
            (validation if held_out else train).write(line)
    recorded.write_text(digest.hexdigest()[:16])
    return recorded.read_text()
