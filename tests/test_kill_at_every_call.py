"""Killed before any system call, a run, an export and a search end where they end undisturbed.

A random sample of calls from each phase of the programme; `make torture` kills at all of them. The seed is in the
summary of pytest and in every failure; KILL_SEED=NUMBER repeats its sample.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_programme import Counts, count, kill_until_hit, sample
from kill_sessions import RUN, Session, copy, trained, training_sessions
from kill_tools import export, preparation, search
from run_results import differences
from system_calls import require_strace

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sessions."""
    require_strace()
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def sessions(root: Path) -> dict[str, Session]:
    """The sessions of the trainer, by name."""
    return {session.name: session for session in training_sessions(root)}


@pytest.fixture
def check(root: Path, record_property: Callable[[str, object], None]) -> Callable[[Session, int, int], None]:
    """Kill a session at a random sample of its calls."""

    def check(session: Session, changing: int, others: int) -> None:
        record_property("seed", f"KILL_SEED={SEED} repeats the sample of {session.name}")
        chosen = sample(session, random.Random(f"{SEED} {session.name}"), changing, others)
        counts = Counts()
        for _, call in chosen:
            count(counts, call, kill_until_hit(session, call, root / "work"))
        assert not counts.problems, f"KILL_SEED={SEED}\n" + "\n".join(counts.problems)
        assert counts.killed >= counts.calls / 2, f"KILL_SEED={SEED}: {counts}"

    return check


@pytest.mark.parametrize("name", ["train", "resume", "rewind"])
def test_a_killed_trainer_resumes(
    name: str, sessions: dict[str, Session], check: Callable[[Session, int, int], None]
) -> None:
    check(sessions[name], {"train": 4, "resume": 5, "rewind": 5}[name], 1)


def test_a_killed_preparation_is_repeated(
    root: Path, sessions: dict[str, Session], check: Callable[[Session, int, int], None]
) -> None:
    check(preparation(root, sessions["train"].base / "text.jsonl"), 3, 0)


def test_a_killed_export_is_repeated(
    root: Path, sessions: dict[str, Session], check: Callable[[Session, int, int], None]
) -> None:
    check(export(root, sessions["rewind"].base), 2, 1)


def test_a_killed_search_is_continued(
    root: Path, sessions: dict[str, Session], check: Callable[[Session, int, int], None]
) -> None:
    check(search(root, sessions["train"].base), 1, 0)


def test_differences_are_noticed(root: Path, sessions: dict[str, Session]) -> None:
    session = sessions["rewind"]
    workspace = copy(session.base, root / "work")
    run = workspace.root / RUN
    (events,) = (run / "tensorboard").iterdir()

    def changed(path: Path, old: bytes, new: bytes) -> list[str]:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))
        found = differences(trained(workspace), session.undisturbed)
        path.write_bytes(content)
        return found

    state = run / "checkpoints/step-00000008/trainer_state.json"
    assert changed(state, b'"step": 8', b'"step": 9') == ["checkpoints/step-00000008/trainer_state.json"]
    assert changed(run / "ledger.jsonl", b'"targets"', b'"target"') == ["ledger.jsonl"]
    assert changed(run / "metrics.jsonl", b'"loss":', b'"loss":1') == ["metrics.jsonl"]
    assert changed(run / "metrics.jsonl", b'"step_seconds":', b'"step_seconds":1') == []
    assert changed(events, events.read_bytes()[-40:], b"") == ["tensorboard/events"]
    assert differences(trained(workspace), session.undisturbed) == []
    (run / "checkpoints/.step-00000008.tmp-1").write_bytes(b"")
    assert differences(trained(workspace), session.undisturbed) == ["checkpoints/.step-00000008.tmp-1"]


def test_a_kill_without_a_resume_is_noticed(root: Path, sessions: dict[str, Session]) -> None:
    session = dataclasses.replace(sessions["train"], ways={"nothing": lambda _: None})
    saves = [call for phase, call in session.calls if phase == "save" and call.changes_files]
    kill = session.kill(saves[len(saves) // 2], root / "work")
    assert kill and "nothing: metrics.jsonl differs" in kill.problems
