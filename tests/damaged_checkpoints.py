"""Runs with two checkpoints to damage, and what is found of the damage: by verifying, and by resuming."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from damage import (
    Damage,
    StoredFolder,
    exchanged,
    flipped_bytes,
    flipped_payload_bits,
    irregular,
    resized,
    taken_from,
)
from orchestrator import _native
from workspace import REPOSITORY, Finished, Workspace

GOLDEN = REPOSITORY / "tests/golden/checkpoints"
KINDS = {"model": "windows_fp32", "adapters": "windows_adapters_fp32"}
OLDER, NEWEST, LAST = (f"step-{step:08}" for step in (4, 8, 12))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(frozen=True)
class SavedRun:
    """A run of 12 steps that was stopped after 8 of them, with checkpoints of steps 4 and 8."""

    workspace: Workspace
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def train(self, *arguments: str | Path) -> Finished:
        return self.workspace.trainer("train", "--config", self.folder / "training.yaml", *arguments)

    def copy(self, root: Path) -> SavedRun:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.workspace.root, root, symlinks=True)
        folder = root / self.folder.relative_to(self.workspace.root)
        return SavedRun(Workspace(root, self.workspace.extra_environment), folder)

    def results(self) -> dict[str, bytes]:
        """Return what training to the last step has left, which must not depend on how it got there."""
        files = [*(self.checkpoints / LAST).iterdir(), self.folder / "ledger.jsonl"]
        return {path.name: path.read_bytes() for path in files}


def saved_run(root: Path, kind: str, *overrides: str) -> SavedRun:
    """Train a run of KINDS in `root`, with every file that a checkpoint of its kind can hold."""
    without = shutil.ignore_patterns("checkpoints", "ledger.jsonl", "metrics.jsonl", "resolved_config.json")
    shutil.copytree(GOLDEN / KINDS[kind], root, ignore=without)
    (root / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (root / "chat_template.jinja").write_text(TEMPLATE)
    config = root / "run" / "training.yaml"
    text = config.read_text().replace("max_keep: 1", "max_keep: 9").replace("total_steps: 8", "total_steps: 12")
    config.write_text(text.replace("evaluation: {every_n_steps: 2", "evaluation: {every_n_steps: 4"))
    run = SavedRun(Workspace(root), root / "run")
    run.train("--max-steps=8", *(f"--override={override}" for override in overrides)).succeeded()
    steps = [path.name for path in sorted(run.checkpoints.glob("step-*"))]
    assert steps == [OLDER, NEWEST]
    return run


@dataclass(frozen=True)
class Verdict:
    """What was found of one damaged checkpoint, the newest of its folder."""

    detected: bool
    """It is refused as corrupted, with exit code 5."""
    named: bool
    """The message names the checkpoint, and a damaged file."""
    newest_taken: bool
    """Of the folder, the newest intact checkpoint is taken instead."""
    nothing_lost: bool
    """The damaged checkpoint is there as before."""

    @property
    def problems(self) -> list[str]:
        return [name for name, holds in vars(self).items() if not holds]


def verify(folder: StoredFolder, damage: Damage) -> Verdict:
    """Damage the newest checkpoint of a folder, and read all bytes as every command does, in this process."""
    checkpoint, fallback = folder.path, folder.path.with_name(OLDER)
    with folder.damaged(damage):
        before = sorted(path.name for path in checkpoint.iterdir())
        with _stderr() as refusal:
            code = _verification(checkpoint)
        with _stderr() as warning:
            taken = _native.model_directory(checkpoint.parent)
        after = sorted(path.name for path in checkpoint.iterdir())
    is_named = all(_is_named(text, damage) for text in (refusal[0], warning[0]))
    return Verdict(code == 5, is_named, taken == fallback, before == after)


def resume(run: SavedRun, damage: Damage, results: dict[str, bytes]) -> Verdict:
    """Damage the newest checkpoint of a run and resume it, from that checkpoint and from the newest intact one.

    Args:
        run: The run, which is used up.
        damage: What is done to its newest checkpoint.
        results: What the run leaves that was not damaged.
    """
    checkpoint = run.checkpoints / NEWEST
    damage.apply(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    refused = run.train("--resume", checkpoint)
    kept = names == sorted(path.name for path in checkpoint.iterdir())
    resumed = run.train("--resume")
    output = resumed.out + resumed.err
    skipped = [line for line in output.splitlines() if "is corrupted and was skipped" in line]
    is_told = len(skipped) == 1 and _is_named(skipped[0], damage)
    taken = resumed.code == 0 and f"resuming at step 4 from {run.checkpoints / OLDER}" in output
    return Verdict(
        refused.code == 5 and "panicked" not in refused.err + output,
        _is_named(refused.err, damage) and is_told,
        taken and run.results() == results,
        kept,
    )


def _verification(checkpoint: Path) -> int:
    """Run `checkpoint verify`, which warns of what it refuses, and return its exit code."""
    try:
        return _native.run_command(["checkpoint", "verify", str(checkpoint)], lambda _: None)
    except _native.TrainerError as error:
        os.write(2, str(error).encode())
        return error.exit_code


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """Collect what this process, its libraries included, writes to stderr until the end of the block."""
    text: list[str] = []
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            text.append(file.read().decode())


def _is_named(message: str, damage: Damage) -> bool:
    return NEWEST in message and any(name in message for name in damage.blamed or damage.names)


def all_damage(run: SavedRun, other: SavedRun, chance: random.Random, part: float) -> Iterator[Damage]:
    """Give the damage to files of the newest checkpoint of a run; `part` of what comes in large numbers.

    Args:
        run: The run.
        other: A run of the same kind with other weights and another state.
        chance: Chooses places and bits.
        part: At most 1, for everything.
    """
    folder = StoredFolder.of(run.checkpoints / NEWEST)
    yield from flipped_bytes(folder, chance, round(1 / part))
    yield from flipped_payload_bits(folder, chance, round(2000 * part))
    yield from resized(folder, chance, round(200 * part))
    yield from exchanged(folder)
    yield from irregular(folder, run.folder / "training.yaml")
    yield from taken_from(folder, run.checkpoints / OLDER, "file of an older checkpoint")
    yield from taken_from(folder, other.checkpoints / NEWEST, "file of another run")
