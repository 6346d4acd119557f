"""Fits the length of fine-tuning to its data: few conversations are read several times, in smaller steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator import _native
from orchestrator.run_files import STREAMING_CONFIG, TOKENIZER
from orchestrator.screen import counted, step
from orchestrator.settings import OpenKeys

SEQUENCES_PER_STEP = 16
STEPS_OF_AN_EPOCH = 100
"""Steps from which on one epoch is the default."""
MOST_EPOCHS = 3
"""trl's default."""
FEWEST_STEPS = 50
"""A step takes fewer sequences rather than that there are fewer steps."""
MOST_COUNTED = SEQUENCES_PER_STEP * STEPS_OF_AN_EPOCH
"""Sequences that are counted at most: with more the defaults are those of large data."""
LONGEST_WARMUP = 10
ONE_AT_A_TIME = (
    "data.sequences_per_step=1", "data.batch_size=1", "data.gradient_accumulation_steps=1", "stages=null",
    "scheduler.total_steps=null", "scheduler.strategy=constant", "scheduler.total_epochs=1", "scheduler.warmup_steps=0",
)  # fmt: skip


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    epochs: int
    sequences_per_step: int
    warmup_steps: int
    steps: int


def warmup_of(steps: int) -> int:
    """Return the default warm-up of a run: a tenth of its steps, at most `LONGEST_WARMUP`."""
    return min(LONGEST_WARMUP, steps // 10)


def length_of(
    sequences: int, epochs: int | None, sequences_per_step: int | None, warmup: int | None, ranks: int = 1
) -> Length:
    """Return the length of a run over so many sequences per epoch; None is what may be chosen.

    A step that is chosen has as many sequences as can be shared equally by the ranks.
    """
    chosen_epochs = epochs or max(1, min(MOST_EPOCHS, -(-MOST_COUNTED // sequences)))
    in_all = sequences * chosen_epochs
    batch = sequences_per_step or SEQUENCES_PER_STEP
    while sequences_per_step is None and in_all // batch < FEWEST_STEPS and batch % (2 * ranks) == 0:
        batch //= 2
    steps = max(1, in_all // batch)
    return Length(chosen_epochs, batch, warmup_of(steps) if warmup is None else warmup, steps)


def fit(values: dict[str, Any], folder: Path, open_keys: OpenKeys, ranks: int) -> str | None:
    """Set the keys of a config that are open, by the sequences that its data make; return what is said of it.

    Args:
        values: The config, with the tokenizer's copy and `streaming_config.json` in the run's folder.
        folder: The run's folder.
        open_keys: The keys that may be set. None of them is where the data are large.
        ranks: The processes that share the sequences of a step.
    """
    if not (open_keys.epochs or open_keys.batch or open_keys.warmup):
        return None
    step("length", f"counting the sequences of the data, at most {MOST_COUNTED:,} ...")
    sequences = _count_sequences(_native.config_to_yaml(values), folder)
    if sequences >= MOST_COUNTED or sequences == 0:
        return None
    data, scheduler = values["data"], values["scheduler"]
    length = length_of(
        sequences,
        None if open_keys.epochs else scheduler["total_epochs"],
        None if open_keys.batch else data["sequences_per_step"],
        None if open_keys.warmup else scheduler["warmup_steps"],
        ranks,
    )
    data["sequences_per_step"] = length.sequences_per_step
    scheduler.update(total_epochs=length.epochs, warmup_steps=length.warmup_steps)
    per_step = counted(length.sequences_per_step, "sequence")
    return (
        f"The data make {counted(sequences, 'sequence')}: {counted(length.epochs, 'epoch')} with {per_step} per "
        f"step are about {counted(length.steps, 'step')}, {length.warmup_steps} of them warm-up. "
        "--epochs or --steps, --batch-size with --grad-accum, and --warmup-steps change that."
    )


def _count_sequences(text: str, folder: Path) -> int:
    """Return the number of sequences of an epoch, at most `MOST_COUNTED`."""
    with tempfile.TemporaryDirectory(prefix=".counting-", dir=folder) as counting:
        for name in (STREAMING_CONFIG, TOKENIZER.parent):
            if (folder / name).exists():
                Path(counting, name).symlink_to(folder.absolute() / name)
        config = Path(counting, "training.yaml")
        config.write_text(text, encoding="utf-8")
        try:
            stream: Iterable[Any] = _native.TokenStream(_native.RunConfig.load(config, ONE_AT_A_TIME))
            return sum(1 for _ in islice(stream, MOST_COUNTED))
        except _native.TrainerError as error:
            # The temporary folder is gone when the message is read; the run's own has the same files.
            error.args = tuple(str(part).replace(counting, str(folder)) for part in error.args)
            raise
