"""Errors of the disk end no run without a word, and lose no checkpoint and no line.

A random sample of every kind of call in every phase; `disk_programme` injects all of them. The seed is in the summary
of pytest and in every failure; DISK_SEED=NUMBER repeats its sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disk_errors import (
    Injection,
    continuing,
    damaged_checkpoints,
    inject,
    injections,
    run_with_error,
    wrong_end,
    wrong_results,
)  # fmt: skip
from disk_programme import injections_of, run, sample
from kill_sessions import RUN, Session, copy, training_sessions
from kill_tools import preparation
from system_calls import require_strace
from workspace import Finished

SEED = int(os.environ.get("DISK_SEED") or random.SystemRandom().randrange(1 << 32))
Check = Callable[..., None]
PREPARATIONS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sessions."""
    require_strace()
    return tmp_path_factory.mktemp("disk-errors")


@pytest.fixture(scope="module")
def sessions(root: Path) -> dict[str, Session]:
    """The sessions of the trainer, by name."""
    return {session.name: session for session in training_sessions(root)}


@pytest.fixture
def check(root: Path, record_property: Callable[[str, object], None]) -> Check:
    """Inject a random sample of the errors of a session."""

    def check(session: Session, most: int | None = None) -> None:
        record_property("seed", f"DISK_SEED={SEED} repeats the sample of {session.name}")
        chosen = sample(injections_of(session, root), random.Random(f"{SEED} {session.name}"))[:most]
        outcomes = list(run(chosen, root / "work"))
        wrong = ["\n".join([str(injection), *outcome.problems]) for injection, outcome in outcomes if outcome.problems]
        assert not wrong, f"DISK_SEED={SEED}\n" + "\n".join(wrong)
        missed = [str(injection) for injection, outcome in outcomes if not outcome.failed]
        assert len(missed) <= len(outcomes) / 4, f"DISK_SEED={SEED}\n" + "\n".join(missed)

    return check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "resume", "rewind"])
def test_an_error_of_the_disk_loses_nothing(name: str, sessions: dict[str, Session], check: Check) -> None:
    check(sessions[name])


@pytest.mark.slow
def test_a_preparation_is_repeated_after_an_error(root: Path, sessions: dict[str, Session], check: Check) -> None:
    check(preparation(root, sessions["train"].base / "text.jsonl"), PREPARATIONS)


def failing_save(session: Session, on_error: str) -> Injection:
    """Return the injection that fails the save of step 6."""
    (injection,) = [
        injection
        for injection in injections({on_error: session})
        if injection.call.name == "rename" and injection.call.label.endswith("/checkpoints/step-00000006")
        if injection.error == "EROFS" and not injection.lasting
    ]
    return injection


def test_continue_warns_and_saves_at_the_next_step(root: Path, sessions: dict[str, Session]) -> None:
    session = continuing(sessions["train"], root / "continuing")
    injection = failing_save(session, "continue")
    workspace = copy(session.base, root / "work")
    finished = run_with_error(injection, session.command, workspace).succeeded()
    (text,) = [row["text"] for row in workspace.metrics(RUN.name, "advice") if row["step"] == 6]
    assert f"warning: {text}\n" in finished.out
    for words in ("step-00000006", "Read-only file system", "the newest checkpoint is", "step-00000004"):
        assert words in text
    assert workspace.checkpoints(RUN.name) == ["step-00000004", "step-00000008"]
    assert wrong_results(injection, workspace, finished) == []
    assert wrong_results(replace(injection, on_error="stop"), workspace, finished) == ["training continued"]
    silent = replace(finished, out=finished.out.replace(text, ""))
    assert wrong_results(injection, workspace, silent) == ["no warning names a missing checkpoint"]
    (workspace.run_folder(RUN.name) / "checkpoints/.step-00000006.tmp-1").mkdir()
    assert wrong_results(injection, workspace, finished) == []
    (workspace.run_folder(RUN.name) / "checkpoints/.step-00000006.tmp-1/config.json").write_text("half")
    assert wrong_results(injection, workspace, finished) == ["checkpoints/.step-00000006.tmp-1/config.json differs"]


def test_a_save_that_fails_stops_the_run(root: Path, sessions: dict[str, Session]) -> None:
    session = sessions["train"]
    outcome = inject(failing_save(session, "stop"), root / "work")
    assert (outcome.code, outcome.problems) == (1, [])
    without_resume = replace(session, ways={"nothing": lambda _: None})
    assert "nothing: checkpoints/latest differs" in inject(failing_save(without_resume, "stop"), root / "work").problems


def test_wrong_ends_are_noticed(sessions: dict[str, Session]) -> None:
    injection = failing_save(sessions["train"], "stop")
    good = f"error: cannot rename {RUN}/checkpoints/step-00000006: Read-only file system\n"
    assert wrong_end(injection, Finished(1, "", good)) == []
    assert wrong_end(injection, Finished(0, "", "")) == []
    assert wrong_end(injection, Finished(101, "", "thread 'main' panicked at")) == [
        "exit code 101", "panic or traceback", "the error is not one paragraph", "the error lacks the system's words",
        "the error names no file",
    ]  # fmt: skip
    assert wrong_end(injection, Finished(1, "", good + "\n" + good)) == ["the error is not one paragraph"]


def test_a_damaged_checkpoint_is_noticed(root: Path, sessions: dict[str, Session]) -> None:
    workspace = copy(sessions["rewind"].base, root / "work")
    assert damaged_checkpoints(workspace, "checkpoint runs/E/checkpoints/step-00000008\n") == []
    assert damaged_checkpoints(workspace, "checkpoint runs/E/checkpoints/step-00000010\n") == ["step-00000010 is lost"]
    (workspace.run_folder(RUN.name) / "checkpoints/step-00000004/model.safetensors").write_bytes(b"half")
    assert damaged_checkpoints(workspace, "") != []
