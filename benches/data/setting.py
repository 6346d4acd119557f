"""The task of every contender: the material, and the batches to make of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAME = "bench/text"
"""The name of the material's data set on the Hub."""


@dataclass(frozen=True)
class Setting:
    """The material and the shape of its batches: `sequences` rows of `sequence_length` inputs and targets."""

    root: Path
    """The material's folder."""
    scratch: Path
    """An empty folder of the contender's own."""
    hub: str | None
    """The data set's name on the Hub of HF_ENDPOINT; None to read the local files."""
    sequence_length: int = 2048
    sequences: int = 8
    shuffle_buffer_size: int = 8192
    workers: int = len(os.sched_getaffinity(0))
    seed: int = 42

    def files(self) -> list[Path]:
        return sorted((self.root / "datasets" / NAME / "data").glob("*.parquet"))
