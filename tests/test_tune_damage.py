"""A study whose database holds altered values ends `orchestrate tune` with one sentence."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from test_tune import SPACE, prepared_folder, study_folder, tune
from workspace import Workspace

__all__ = ["prepared_folder"]

ALTERED = {
    "text for a loss": "UPDATE trial_values SET value = 'low'",
    "no loss": "UPDATE trial_values SET value = NULL",
    "no losses": "DELETE FROM trial_values",
    "infinite loss": "UPDATE trial_values SET value_type = 'OTHER'",
    "text for an evaluation": "UPDATE trial_intermediate_values SET intermediate_value = 'low'",
    "text for a step": "UPDATE trial_intermediate_values SET step = 'late' || step",
    "unknown state": "UPDATE trials SET state = 'LOST'",
    "text for a number": "UPDATE trials SET number = 'first'",
    "huge number": "UPDATE trials SET number = 9223372036854775807",
    "text for a date": "UPDATE trials SET datetime_start = 'today'",
    "broken distribution": "UPDATE trial_params SET distribution_json = '{'",
    "unknown distribution": """UPDATE trial_params SET distribution_json = '{"name": "X", "attributes": {}}'""",
    "text for a parameter": "UPDATE trial_params SET param_value = 'x'",
    "choice that there is none of": "UPDATE trial_params SET param_value = 99",
    "other identity": "UPDATE study_user_attributes SET value_json = '[]'",
    "broken identity": "UPDATE study_user_attributes SET value_json = '{'",
    "broken overrides": "UPDATE trial_user_attributes SET value_json = '3'",
    "unknown override": """UPDATE trial_user_attributes SET value_json = '{"no.key": 3}'""",
    "other direction": "UPDATE study_directions SET direction = 'UP'",
    "missing table": "DROP TABLE trial_values",
    "other schema": "UPDATE version_info SET schema_version = 99",
    "no schema": "DELETE FROM version_info",
    "other migration": "UPDATE alembic_version SET version_num = 'x'",
}


@pytest.fixture(scope="module")
def study_root(prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of two trials."""
    workspace = Workspace(tmp_path_factory.mktemp("searched"))
    shutil.copytree(prepared_folder / "runs", workspace.root / "runs")
    (workspace.root / "space.yaml").write_text(SPACE)
    tune(workspace, "--trials=2", "--seeds=0", "--pruner=none").succeeded()
    return workspace.root


@pytest.mark.slow
@pytest.mark.parametrize("what", ALTERED)
def test_altered_values_of_a_study_are_one_sentence(study_root: Path, workspace: Workspace, what: str) -> None:
    shutil.copytree(study_root, workspace.root, dirs_exist_ok=True)
    with contextlib.closing(sqlite3.connect(study_folder(workspace) / "study.db")) as database, database:
        database.execute(ALTERED[what])
    for trials in (2, 3):
        result = tune(workspace, f"--trials={trials}", "--seeds=0", "--pruner=none")
        assert "a bug" not in result.err and "Traceback" not in result.err, result.err
        if result.code != 0:
            result.refused(2, "orchestrate: ", "E-tune")
            assert result.err.count("\n") == 1, result.err
