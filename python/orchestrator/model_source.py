"""What names a model, and the directory that is read: where a live run removes it meanwhile, the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator import _native
from orchestrator.command_error import CommandError
from orchestrator.input_files import POINTERS
from orchestrator.paths import shown
from orchestrator.screen import note
from orchestrator.watch.checkpoints import STEP

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """The options that name a model: a folder or an experiment, and the base model of adapters where it has moved."""

    checkpoint: Path | None
    experiment: str | None
    base_model: str | None = None
    directory: Path | None = None
    """The directory that was found, which is read."""

    def folder(self) -> Path:
        """Return the directory that is named; the files of a checkpoint are verified."""
        return self.directory or _native.model_directory(self.checkpoint, self.experiment)

    def read(self, read: Callable[[Source], T]) -> T:
        """Return what `read` makes of the directory that is named.

        Where a live run removes that checkpoint meanwhile, the one that the name then stands for is read. `read` must
        fail if the directory is gone.

        Raises:
            CheckpointError: One checkpoint was named, and it was removed.
        """
        while True:
            resolved = dataclasses.replace(self, directory=self.folder())
            try:
                return read(resolved)
            except (CommandError, _native.TrainerError, OSError):
                if resolved.folder().exists():
                    raise
            note(f"{shown(resolved.folder())} was removed while it was read, as a run does with old checkpoints")


def named_source(
    verb: str, run: str | None, checkpoint: Path | None, experiment: str | None, base_model: str | None
) -> Source:
    """Return what was named, in one of the ways there are; the newest run where nothing was.

    Args:
        verb: What the command does, for messages.
        run: A run's name, its directory, a checkpoint, a config, or a model's directory.
        checkpoint: A folder, by `--checkpoint`.
        experiment: A name, by `--experiment`.
        base_model: The base model of adapters, where it has moved.
    """
    if sum(named is not None for named in (run, checkpoint, experiment)) > 1:
        raise CommandError(f"say one thing to {verb}: RUN, --experiment NAME or --checkpoint DIR")
    if checkpoint is None and experiment is None:
        checkpoint = _native.model_of_run(run)
        # A link stays one: another checkpoint may be the latest or the best when it is read.
        if run is not None and Path(run).name in POINTERS and STEP.fullmatch(checkpoint.name):
            checkpoint = checkpoint.with_name(Path(run).name)
    return Source(checkpoint, experiment, base_model)
