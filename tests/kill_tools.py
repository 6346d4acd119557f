"""The sessions of `orchestrate` that are killed: it prepares a run, exports a model, and searches."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import yaml
from kill_sessions import CONFIG, PREPARE, RUN, TRAIN, Results, Session, all_as, command, copy, undisturbed
from run_results import run_results
from workspace import ORCHESTRATE, Workspace

EXPORT = (ORCHESTRATE, "export", "E", "--format=hf", "--out=exported")
SPACE = "parameters: {data.sequences_per_step: [4, 8]}\n"
TRIALS = 2
SEARCH = (
    ORCHESTRATE, "tune", "space.yaml", "--experiment=E", f"--trials={TRIALS}", "--seeds=0", "--evaluations=1",
    "--pruner=none", "--sampler=random",
)  # fmt: skip


def preparation(root: Path, text: Path) -> Session:
    """Prepare the session that trains a tokenizer and writes the files of a run."""
    base = root / "text"
    base.mkdir()
    shutil.copy(text, base)
    workspace = copy(base, root / "work")
    calls = undisturbed(PREPARE, workspace, all_as("start-up (orchestrate)"))
    workspace.command(*TRAIN).succeeded()
    return Session("prepare", base, PREPARE, calls, {"the same command": prepared_and_trained}, files, files(workspace))


def prepared_and_trained(workspace: Workspace) -> None:
    """Prepare the run again and train it; the trainer removes what the killed command left in its folder."""
    workspace.command(*PREPARE).succeeded()
    workspace.command(*TRAIN).succeeded()


def export(root: Path, complete: Path) -> Session:
    """Prepare the session that exports a model."""
    workspace = copy(complete, root / "work")
    calls = undisturbed(EXPORT, workspace, all_as("export"))
    return Session("export", complete, EXPORT, calls, {"the same command": exported}, files, files(workspace))


def exported(workspace: Workspace) -> None:
    """Export again; where there is a folder already it is complete, and the command does not touch it."""
    is_there = (workspace.root / "exported").exists()
    finished = workspace.command(*EXPORT)
    if is_there:
        finished.refused(2, "exported", "not empty")
    else:
        finished.succeeded()


def search(root: Path, prepared: Path) -> Session:
    """Prepare the session that searches: two trials of two values of one key."""
    base = root / "search"
    workspace = copy(prepared, base)
    (base / "space.yaml").write_text(SPACE)
    (base / RUN / "training.yaml").write_text(CONFIG.replace("total_steps: 8", "total_steps: 4"))
    workspace = copy(base, root / "work")
    calls = undisturbed(SEARCH, workspace, all_as("search"))
    losses = dict(trials(workspace))
    assert len(losses) == TRIALS, "both values are tried"

    def results(workspace: Workspace) -> Results:
        """Check a study against the losses of its values; return how many trials have ended."""
        ended = trials(workspace)
        assert all(losses[value] == loss for value, loss in ended), f"{ended} are not of {losses}"
        best = min(ended, key=lambda trial: trial[1])[0]
        config = yaml.safe_load((workspace.run_folder("E-tune") / "best.yaml").read_text())
        assert config["data"]["sequences_per_step"] == best, "the best trial's config is written"
        return {"trials": str(len(ended)).encode()}

    ways = {"the same command": command(*SEARCH)}
    return Session("search", base, SEARCH, calls, ways, results, {"trials": str(TRIALS).encode()})


def trials(workspace: Workspace) -> list[tuple[int, float]]:
    """Return the value and the loss of every complete trial of the study."""
    query = (
        "SELECT param_value, value FROM trials JOIN trial_params USING (trial_id) JOIN trial_values USING (trial_id) "
        "WHERE state = 'COMPLETE' ORDER BY number"
    )
    with closing(sqlite3.connect(workspace.run_folder("E-tune") / "study.db")) as database:
        return [((4, 8)[int(choice)], float(loss)) for choice, loss in database.execute(query)]


def files(workspace: Workspace) -> Results:
    """Return every file of the workspace."""
    return run_results(workspace.root)
