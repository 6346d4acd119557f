"""After a power loss a run resumes from an intact checkpoint and ends where it ends undisturbed.

The power is lost in a model of the disk (`power_loss.py`) at a random sample of moments; `make torture` tries more at
every call. The seed is in the summary of pytest and in every failure; POWER_SEED=NUMBER repeats its sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from file_operations import Operation, record_operations
from kill_sessions import PREPARE, RUN, TRAIN, Session, copy, log_of, training_sessions
from power_loss import ANY, KEPT, LOST, Contents, Disk, PowerLoss, broken_promise, power_losses, write_out
from system_calls import require_strace
from workspace import Workspace

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("POWER_SEED") or random.SystemRandom().randrange(1 << 32))
CHECKPOINTS = f"{RUN}/checkpoints"
SESSIONS = ["train", "resume", "rewind"]
SAMPLES = {LOST: 1, KEPT: 1, ANY: 4}
"""Power losses that are tried in each session, by the chance that something survives."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sessions."""
    require_strace()
    return tmp_path_factory.mktemp("power")


@pytest.fixture(scope="module")
def sessions(root: Path) -> dict[str, Session]:
    """The sessions of the trainer, by name."""
    return {session.name: session for session in training_sessions(root)}


@pytest.fixture(scope="module")
def operations(sessions: dict[str, Session], root: Path) -> dict[str, list[Operation]]:
    """What each session does to files, undisturbed."""
    return {session.name: recorded(session, root / "work") for session in sessions.values()}


def recorded(session: Session, work: Path) -> list[Operation]:
    workspace = copy(session.base, work)
    return record_operations(session.command, work, workspace.environment, log_of(work))


def losses(session: Session, operations: list[Operation], root: Path) -> list[PowerLoss]:
    chance = random.Random(f"{SEED} {session.name}")
    return list(power_losses(session.base, root / "work", operations, chance, list(SAMPLES)))


def tree(root: Path) -> Contents:
    """Return what a folder holds."""
    contents: Contents = {}
    for path in root.rglob("*"):
        content = path.readlink() if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        contents[str(path.relative_to(root))] = content
    return contents


@pytest.mark.parametrize("name", SESSIONS)
def test_the_model_without_a_power_loss_is_the_disk(name: str, sessions: dict[str, Session], root: Path) -> None:
    operations = recorded(sessions[name], root / "work")
    disk = Disk.of(sessions[name].base, root / "work")
    for operation in operations:
        disk.apply(operation)
    assert disk.after_power_loss(KEPT, random.Random(0)) == tree(root / "work")


@pytest.mark.parametrize("name", SESSIONS)
def test_a_run_resumes_after_a_power_loss(
    name: str,
    sessions: dict[str, Session],
    operations: dict[str, list[Operation]],
    root: Path,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("seed", f"POWER_SEED={SEED} repeats the power losses of {name}")
    all_losses, chance = losses(sessions[name], operations[name], root), random.Random(SEED)
    for survival, number in SAMPLES.items():
        for loss in chance.sample([loss for loss in all_losses if loss.survival == survival], number):
            write_out(loss.contents, root / "work")
            problems = sessions[name].problems(Workspace(root / "work"))
            assert not problems, (
                f"POWER_SEED={SEED}: after call {loss.calls} of {name}, survival {survival}: {problems}"
            )


@pytest.mark.parametrize("name", SESSIONS)
def test_an_announced_checkpoint_is_durable(
    name: str, sessions: dict[str, Session], operations: dict[str, list[Operation]], root: Path
) -> None:
    all_losses = losses(sessions[name], operations[name], root)
    assert sum(loss.announced is not None for loss in all_losses) > 1
    broken = [
        f"after call {loss.calls}: {problem}" for loss in all_losses if (problem := broken_promise(loss, CHECKPOINTS))
    ]
    assert not broken, f"POWER_SEED={SEED}\n" + "\n".join(broken[:5])


def test_a_missing_fsync_is_noticed(
    sessions: dict[str, Session], operations: dict[str, list[Operation]], root: Path
) -> None:
    forgetful = [
        operation for operation in operations["resume"]
        if operation.name != "sync" or operation.paths[0].name != "model.safetensors"
    ]  # fmt: skip
    all_losses = losses(sessions["resume"], forgetful, root)
    assert any("model.safetensors" in (broken_promise(loss, CHECKPOINTS) or "") for loss in all_losses)


def test_the_files_of_a_run_are_as_durable_as_its_checkpoints(sessions: dict[str, Session], root: Path) -> None:
    workspace, base = Workspace(root / "work"), root / "text_only"
    write_out({"text.jsonl": (sessions["train"].base / "text.jsonl").read_bytes()}, base)
    copy(base, workspace.root)
    operations = []
    for command in (PREPARE, TRAIN):
        operations += record_operations(command, workspace.root, workspace.environment, log_of(workspace.root))
    undisturbed, disk = tree(workspace.root), Disk.of(base, workspace.root)
    for operation in operations:
        disk.apply(operation)
    durable = disk.after_power_loss(LOST, random.Random(0))
    names = [
        "training.yaml",
        "special_tokens.txt",
        "tokenizer/tokenizer.json",
        "checkpoints/step-00000004/MANIFEST.json",
    ]
    lost_files = [name for name in names if durable.get(f"{RUN}/{name}") != undisturbed[f"{RUN}/{name}"]]
    assert not lost_files
