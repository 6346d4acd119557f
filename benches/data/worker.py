"""One contender at one task in a process of its own; prints one JSON line. `run.py` and `resume.py` call it."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from setting import Setting

Batch = tuple[np.ndarray, np.ndarray]
Batches = Iterator[Batch]
CONTENDERS = ("ours", "ours-tokenizers", "datasets", "datasets-stateful")
TASKS = ("read", "pace", "depart", "resume", "skip")
"""Read; read at a trainer's pace; read some and save the state; resume from it; skip as many batches instead."""
COMPARED_BATCHES = 128
"""Batches after a stop whose hashes are compared."""
TOKENS_PER_SECOND = 100_000
"""The simulated trainer's speed, at whose pace batches are taken."""


def contender(name: str, setting: Setting) -> Any:
    # Imported only where it is asked for: each would add to the other's memory and start-up time.
    if name.startswith("ours"):
        from ours import Ours

        return Ours(setting, "library.json" if name == "ours-tokenizers" else "tokenizer.json")
    from theirs import Theirs

    return Theirs(setting, stateful=name == "datasets-stateful")


def read(batches: Batches, begin: float) -> dict[str, float]:
    """Take batches as fast as they come."""
    tokens, first = 0, 0.0
    for _, targets in batches:
        first = first or time.perf_counter() - begin
        tokens += int((targets >= 0).sum())
    return {"seconds": time.perf_counter() - begin, "first_batch_seconds": first, "tokens": tokens}


def pace(batches: Batches, begin: float, seconds: float) -> dict[str, float]:
    """Take batches as a trainer does; return the share of its time that it waited for data after the first batch."""
    batch: Batch | None = next(batches)
    first, waited, worked = time.perf_counter() - begin, 0.0, 0.0
    while batch and waited + worked < seconds:
        computing = batch[0].size / TOKENS_PER_SECOND
        worked += computing
        time.sleep(computing)
        requested_at = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - requested_at
    return {"first_batch_seconds": first, "wait_share": waited / (waited + worked), "seconds": waited + worked}


def digests(batches: Batches) -> list[str]:
    """Return the SHA-256 of each of the next batches."""
    return [
        hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
        for inputs, targets in itertools.islice(batches, COMPARED_BATCHES)
    ]


def following(batches: Batches, begin: float) -> dict[str, Any]:
    """Return the hashes of the batches after a resume, and the seconds to the first and to all of them."""
    batches = itertools.chain([next(batches)], batches)
    first = time.perf_counter() - begin
    return {"first_batch_seconds": first, "digests": digests(batches), "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--hub")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batches", type=int, default=0, help="to read, or before the state is taken")
    parser.add_argument("--state", type=Path)
    arguments = parser.parse_args()
    setting = Setting(arguments.root, arguments.scratch, arguments.hub)
    loader = contender(arguments.contender, setting)
    begin = time.perf_counter()
    answer: dict[str, Any]
    match arguments.task:
        case "read":
            answer = read(itertools.islice(loader.batches(), arguments.batches), begin)
        case "pace":
            answer = pace(loader.batches(), begin, arguments.seconds)
        case "depart":
            batches = loader.batches()
            for _ in itertools.islice(batches, arguments.batches):
                pass
            state = pickle.dumps(loader.state())
            arguments.state.write_bytes(state)
            answer = {"state_bytes": len(state), "digests": digests(batches)}
        case "resume":
            answer = following(loader.batches(pickle.loads(arguments.state.read_bytes())), begin)
        case _:
            answer = following(itertools.islice(loader.batches(), arguments.batches, None), begin)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
