"""Hyperparameter search: real studies on a tiny model, interrupted, continued, refused, and opened by others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from orchestrator import RunConfig
from orchestrator.command_error import CommandError
from orchestrator.screen import counted
from orchestrator.tune import space as search_space
from orchestrator.tune.command import run
from orchestrator.tune.options import Request
from orchestrator.tune.trial_config import open_base, tokens_of
from workspace import ORCHESTRATE, REPOSITORY, TINY_MODEL, Finished, Workspace

SPACE = """
parameters:
  optimizer.learning_rate: {low: 1e-3, high: 1e-1, log: true}
  data.sequences_per_step: [4, 8]
"""
STEPS = 12
TOKENS = STEPS * 4 * 32


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the experiment E, ready to train."""
    workspace = Workspace(tmp_path_factory.mktemp("prepared"))
    flags = [f"--steps={STEPS}", "--evaluate-every=6", "--launch=none", "--experiment=E"]
    workspace.orchestrate(*TINY_MODEL, *flags, "--input", workspace.write_text()).succeeded()
    return workspace.root


@pytest.fixture
def prepared_workspace(prepared_folder: Path, workspace: Workspace) -> Workspace:
    """A workspace with the experiment E, ready to train, and a search space."""
    shutil.copytree(prepared_folder / "runs", workspace.root / "runs")
    (workspace.root / "space.yaml").write_text(SPACE)
    return workspace


def tune(workspace: Workspace, *flags: str) -> Finished:
    return workspace.orchestrate("tune", "space.yaml", "--experiment=E", "--evaluations=3", *flags)


def study_folder(workspace: Workspace) -> Path:
    return workspace.run_folder("E-tune")


def storage(workspace: Workspace) -> str:
    return f"sqlite:///{study_folder(workspace) / 'study.db'}"


def trials(workspace: Workspace) -> list[FrozenTrial]:
    return optuna.load_study(study_name="E-tune", storage=storage(workspace)).trials


def test_a_search_ends_with_the_best_config_trained_beside_the_base(prepared_workspace: Workspace) -> None:
    process = tune(prepared_workspace, "--trials=6", "--seeds=2").succeeded()
    finished_trials = trials(prepared_workspace)
    complete = [trial for trial in finished_trials if trial.state is TrialState.COMPLETE]
    assert len(finished_trials) == 6
    assert finished_trials[0].params == {"optimizer.learning_rate": 3e-3, "data.sequences_per_step": 4}, (
        "the base comes first"
    )
    best = min(complete, key=lambda trial: trial.value or 0.0)
    assert f"best: trial {best.number}, loss {best.value:.4f} after {TOKENS:,} tokens" in process.out

    best_config = RunConfig.load_for_planning(study_folder(prepared_workspace) / "best.yaml").to_dict()
    assert best_config["optimizer"]["learning_rate"] == best.params["optimizer.learning_rate"]
    assert best_config["data"]["sequences_per_step"] == best.params["data.sequences_per_step"]
    assert best_config["scheduler"]["total_steps"] * best_config["data"]["sequences_per_step"] * 32 == TOKENS

    finals = {
        name: [prepared_workspace.metrics(f"E-tune/{name}-seed-{seed}", "evaluation")[-1]["loss"] for seed in (1, 2)]
        for name in ("base", "winner")
    }
    for losses in finals.values():
        assert f"loss {sum(losses) / 2:.4f}" in process.out
    assert finals["base"][0] != finals["base"][1]
    assert prepared_workspace.checkpoints("E-tune/winner-seed-1")


def test_trials_train_equal_tokens_and_leave_no_checkpoints(prepared_workspace: Workspace) -> None:
    tune(prepared_workspace, "--trials=5", "--pruner=none", "--seeds=0").succeeded()
    folders = sorted((study_folder(prepared_workspace) / "trials").iterdir())
    assert len(folders) == 5
    assert {len(trial.intermediate_values) for trial in trials(prepared_workspace)} == {3}
    assert {max(trial.intermediate_values) for trial in trials(prepared_workspace)} == {TOKENS}
    for folder in folders:
        config = RunConfig.load(folder / "training.yaml").to_dict()
        assert config["scheduler"]["total_steps"] * config["data"]["sequences_per_step"] * 32 == TOKENS
        assert not (folder / "checkpoints").exists()


def test_trials_of_every_batch_see_equal_tokens_and_held_out_text(prepared_workspace: Workspace) -> None:
    process = tune(prepared_workspace, "--trials=8", "--pruner=none", "--sampler=random", "--seeds=0").succeeded()
    folders = sorted((study_folder(prepared_workspace) / "trials").iterdir())
    evaluated = {evaluation(folder, "tokens") for folder in folders}
    batches = {RunConfig.load(folder / "training.yaml").to_dict()["data"]["sequences_per_step"] for folder in folders}
    assert batches == {4, 8}, process.out
    assert len(evaluated) == 1


def evaluation(folder: Path, key: str) -> Any:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if line["kind"] == "evaluation"][-1]


def test_keys_in_steps_keep_their_share(prepared_workspace: Workspace) -> None:
    base = open_base(prepared_workspace.run_folder("E") / "training.yaml", None, None)
    changes = {"data.sequences_per_step": 8, "scheduler.strategy": "wsd"}
    values = base.trial_values(changes, 100 * TOKENS)
    assert values["scheduler"]["total_steps"] == 50 * STEPS
    assert values["scheduler"]["warmup_steps"] == 50 * 2
    assert (
        values["runtime"]["evaluation"] | {"every_n_steps": 50 * 6, "max_batches": 1}
        == (values["runtime"]["evaluation"])
    )
    config = base.trial_values(changes | {"scheduler.warmup_steps": 3, "scheduler.decay_steps": 5}, 100 * TOKENS)
    assert (config["scheduler"]["warmup_steps"], config["scheduler"]["decay_steps"]) == (3, 5)
    growing = base.trial_values({"scheduler.batch_warmup_steps": 200}, 100 * TOKENS)
    assert growing["scheduler"]["total_steps"] > 100 * STEPS
    assert tokens_of(growing, growing["scheduler"]["total_steps"]) == pytest.approx(100 * TOKENS, abs=4 * 32)


def test_base_and_winner_are_trained_on_as_many_tokens_as_asked_for(prepared_workspace: Workspace) -> None:
    process = tune(prepared_workspace, "--trials=2", "--seeds=1", f"--final-tokens={2 * TOKENS}").succeeded()
    assert f"Trained on {2 * TOKENS:,} tokens" in process.out and "over 1 seed: " in process.out
    assert prepared_workspace.metrics("E-tune/base-seed-1")[-1]["step"] == 2 * STEPS
    best_config = RunConfig.load_for_planning(study_folder(prepared_workspace) / "best.yaml").to_dict()
    assert best_config["scheduler"]["total_steps"] * best_config["data"]["sequences_per_step"] * 32 == TOKENS
    tune(prepared_workspace, "--trials=2", "--seeds=1").refused(2, "begun with 24 steps, not 12", "--final-tokens")


def test_a_hopeless_trial_is_pruned_before_its_end(prepared_workspace: Workspace) -> None:
    (prepared_workspace.root / "space.yaml").write_text(
        "parameters: {optimizer.learning_rate: [3e-3, 4e-3, 5e-3, 6e-3, 1.0]}"
    )
    process = tune(prepared_workspace, "--trials=12", "--sampler=random", "--seeds=0").succeeded()
    by_state = Counter(trial.state for trial in trials(prepared_workspace))
    assert by_state[TrialState.PRUNED] > 0
    pruned = next(trial for trial in trials(prepared_workspace) if trial.state is TrialState.PRUNED)
    assert max(pruned.intermediate_values) < TOKENS
    assert f"trial {pruned.number:<5}pruned at loss" in process.out


def test_a_continued_search_draws_other_values(prepared_workspace: Workspace) -> None:
    search = ("--sampler=random", "--pruner=none", "--seeds=0", "--evaluations=1")
    assert "evaluated 1 time\n" in tune(prepared_workspace, "--trials=2", *search).succeeded().out
    tune(prepared_workspace, "--trials=4", *search).succeeded()
    assert len({str(sorted(trial.params.items())) for trial in trials(prepared_workspace)}) == 4


@pytest.mark.slow
def test_a_killed_search_repeats_what_was_running_and_keeps_the_rest(prepared_workspace: Workspace) -> None:
    flags = ["tune", "space.yaml", "--experiment=E", "--evaluations=3", "--trials=4", "--seeds=0", "--pruner=none"]
    flags += [f"--tokens={30 * TOKENS}"]  # a trial takes longer than to look for it
    process = prepared_workspace.start(ORCHESTRATE, *flags)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("trial 0 "):
            break
    running = wait_for_running_trial(prepared_workspace)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {trial.number: trial.value for trial in trials(prepared_workspace) if trial.state is TrialState.COMPLETE}
    resumed_search = prepared_workspace.orchestrate(*flags).succeeded()
    assert f"Trial {running.number} was interrupted" in resumed_search.out
    after = {trial.number: trial for trial in trials(prepared_workspace)}
    assert after[running.number].state is TrialState.FAIL
    (repeated,) = (trial for trial in after.values() if trial.user_attrs.get("repeats") == running.number)
    assert repeated.params == running.params
    assert repeated.state is TrialState.COMPLETE
    assert {number: after[number].value for number in before} == before
    assert sum(trial.state is TrialState.COMPLETE for trial in after.values()) == 4


def wait_for_running_trial(workspace: Workspace) -> FrozenTrial:
    """Return a running trial, once it has drawn all of its values."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for trial in trials(workspace):
            if trial.state is TrialState.RUNNING and len(trial.params) == 2:
                return trial
    raise AssertionError("no trial is running")


def test_trials_run_side_by_side_with_their_share_of_the_cores(prepared_workspace: Workspace) -> None:
    process = tune(prepared_workspace, "--trials=4", "--jobs=2", "--seeds=0").succeeded()
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert f"2 at a time with {counted(threads, 'thread')} each" in process.out
    for folder in (study_folder(prepared_workspace) / "trials").iterdir():
        assert RunConfig.load(folder / "training.yaml").to_dict()["runtime"]["threads"] == threads
    assert (
        RunConfig.load_for_planning(study_folder(prepared_workspace) / "best.yaml").to_dict()["runtime"]["threads"]
        is None
    )


def test_models_keep_a_fixed_number_of_parameters(prepared_workspace: Workspace) -> None:
    (prepared_workspace.root / "space.yaml").write_text(
        "parameters: {model.num_layers: [1, 2, 8]}\nfixed_parameters: 200K\n"
    )
    tune(prepared_workspace, "--trials=6", "--sampler=random", "--seeds=0").succeeded()
    overrides_by_depth = {
        trial.params["model.num_layers"]: trial.user_attrs["overrides"] for trial in trials(prepared_workspace)
    }
    assert len(overrides_by_depth) > 1
    for overrides in overrides_by_depth.values():
        layers, hidden = overrides["model.num_layers"], overrides["model.hidden_size"]
        inner, kv = overrides["model.intermediate_size"], overrides["model.num_key_value_heads"] * 8
        block = hidden * (2 * hidden + 2 * kv) + 3 * hidden * inner + 2 * hidden
        parameters = layers * block + 384 * hidden + hidden
        assert parameters == pytest.approx(200_000, rel=0.2)


def test_what_does_not_fit_in_memory_is_not_started(prepared_workspace: Workspace) -> None:
    config = prepared_workspace.run_folder("E") / "training.yaml"
    config.write_text(config.read_text().replace("memory_limit: null", "memory_limit: 24MB"))
    (prepared_workspace.root / "space.yaml").write_text("parameters: {model.hidden_size: [32, 512]}")
    process = tune(prepared_workspace, "--trials=5", "--sampler=random", "--seeds=0").succeeded()
    refused_trials = [trial for trial in trials(prepared_workspace) if trial.params["model.hidden_size"] == 512]
    assert refused_trials
    assert all(not trial.intermediate_values for trial in refused_trials)
    assert "not trained: this run does not fit" in process.out


def test_a_space_where_nothing_can_be_trained_ends_with_the_reason(prepared_workspace: Workspace) -> None:
    (prepared_workspace.root / "space.yaml").write_text("parameters: {model.hidden_size: [33, 35]}")
    process = tune(prepared_workspace, "--trials=24", "--seeds=0")
    process.refused(2, "the last 10 trials could not be trained", "Narrow the search space")
    assert len(trials(prepared_workspace)) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameters: {optimizer.learning_rat: [1e-3]}", ["optimizer.learning_rat: is not a config key"]),
        ("parameters: {optimizer: [1]}", ["optimizer: is a section", "optimizer.algorithm"]),
        ("parameters: {optimizer.learning_rate: 3}", ["must be a list of values, or a range"]),
        ("parameters: {optimizer.learning_rate: {low: 1}}", ["a range needs high"]),
        ("parameters: {optimizer.learning_rate: {low: 1e-2, high: 1e-3}}", ["low must be at most high"]),
        ("parameters: {optimizer.weight_decay: {low: 0, high: 1, log: true}}", ["must begin above 0"]),
        ("parameters: {model.num_layers: {low: 1.5, high: 3}}", ["must be integers"]),
        ("parameters: {optimizer.algorithm: {low: 1, high: 2}}", ["has no range: give a list"]),
        ("parameters: {model.num_layers: [2]}\nfixed_parameters: many", ["fixed_parameters: is 'many'"]),
        ("parameters: {model.hidden_size: [32]}\nfixed_parameters: 1M", ["follows from fixed_parameters"]),
        ("parameters: {scheduler.total_steps: [4, 8]}", ["follows from --tokens"]),
        ("parameters: {}", ["names no config key"]),
        ("parameter: {}", ["must be a mapping with `parameters:`"]),
        ("parameters: [", ["cannot read the search space"]),
        ("parameters: {a: [1], b: {low: x, high: 2}}", ["a: is not a config key", "b: is not a config key"]),
    ],
)
def test_a_wrong_space_is_described(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(CommandError) as refusal:
        search_space.read(file)
    for word in [str(file), *words]:
        assert word in str(refusal.value)


def test_a_space_that_no_config_may_have_is_refused(prepared_workspace: Workspace) -> None:
    keys = "optimizer.algorithm: [adam], optimizer.learning_rate: {low: 1e-3, high: 5}, data.train_shards: [x]"
    (prepared_workspace.root / "space.yaml").write_text(f"parameters: {{{keys}}}")
    problems = ("optimizer.algorithm: is", "optimizer.learning_rate: is 5", "data.train_shards: is a list")
    tune(prepared_workspace).refused(2, "the search space holds what no config may have", *problems)
    assert not (study_folder(prepared_workspace) / "study.db").exists()


def test_another_space_needs_another_study(prepared_workspace: Workspace) -> None:
    tune(prepared_workspace, "--trials=1", "--seeds=0").succeeded()
    (prepared_workspace.root / "space.yaml").write_text(SPACE.replace("1e-1", "2e-1"))
    tune(prepared_workspace, "--trials=2", "--seeds=0").refused(2, "was begun with another space", "--study")
    tune(prepared_workspace, "--study=../x").refused(2, "--study '../x' is not a name")


@pytest.mark.parametrize("study", ["E", "linked", "other"])
def test_a_study_is_not_searched_in_a_run(prepared_workspace: Workspace, study: str) -> None:
    run = prepared_workspace.run_folder("E")
    prepared_workspace.run_folder("linked").symlink_to(run)
    shutil.copytree(run, prepared_workspace.run_folder("other"))
    before = {path: path.read_bytes() for path in (prepared_workspace.root / "runs").rglob("*") if path.is_file()}
    whose = "another run" if study == "other" else "the run that is varied"
    message = f"--study {study}: {prepared_workspace.run_folder(study)} is the directory of {whose}"
    tune(prepared_workspace, f"--study={study}").refused(2, message)
    assert {
        path: path.read_bytes() for path in (prepared_workspace.root / "runs").rglob("*") if path.is_file()
    } == before


def test_values_are_shown_as_yaml_has_them(prepared_workspace: Workspace) -> None:
    (prepared_workspace.root / "space.yaml").write_text(
        "parameters: {data.tokens_per_step: [128, 256], optimizer.max_grad_norm: [null], model.tie_embeddings: [true]}"
    )
    process = tune(prepared_workspace, "--trials=1", "--seeds=0").succeeded()
    assert "tokens_per_step 128, max_grad_norm null, tie_embeddings true" in process.out


def test_one_study_is_searched_by_one_command(prepared_workspace: Workspace) -> None:
    process = prepared_workspace.start(ORCHESTRATE, "tune", "space.yaml", "--experiment=E", "--trials=500", "--seeds=0")
    assert process.stdout
    for line in process.stdout:
        if line.startswith("study "):
            break
    tune(prepared_workspace).refused(2, "is in use by process")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "Traceback" not in out


def test_a_locked_or_damaged_database_is_named(prepared_workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(prepared_workspace, "--trials=1", "--seeds=0").succeeded()
    database = study_folder(prepared_workspace) / "study.db"
    monkeypatch.chdir(prepared_workspace.root)
    monkeypatch.setattr("orchestrator.tune.search.LOCK_TIMEOUT", 0)
    request = Request(Path("space.yaml"), experiment="E", trials=2, evaluations=3, seeds=0)
    with sqlite3.connect(database) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CommandError, match=r"study\.db cannot be used: .*database is locked"):
            run(request)
        other.rollback()
    database.write_bytes(b"no database" * 1000)
    tune(prepared_workspace).refused(2, "study.db cannot be used", "file is not a database")


def test_optuna_dashboard_opens_the_study(prepared_workspace: Workspace) -> None:
    tune(prepared_workspace, "--trials=3", "--seeds=0").succeeded()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dashboard = prepared_workspace.start(
        ORCHESTRATE.with_name("optuna-dashboard"), storage(prepared_workspace), f"--port={port}"
    )
    try:
        summaries = get(port, "/api/studies")["study_summaries"]
        assert [summary["study_name"] for summary in summaries] == ["E-tune"]
        assert len(get(port, f"/api/studies/{summaries[0]['study_id']}")["trials"]) == 3
    finally:
        dashboard.kill()
        dashboard.wait()


def get(port: int, path: str) -> Any:
    """Return the answer of a server, after waiting until it listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return json.load(answer)
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() > deadline:
                raise


def test_the_report_has_history_importance_and_coordinates(prepared_workspace: Workspace) -> None:
    tune(prepared_workspace, "--trials=4", "--pruner=none", "--seeds=0").succeeded()
    page = (study_folder(prepared_workspace) / "report.html").read_text()
    for title in ("Optimization History Plot", "Hyperparameter Importances", "Parallel Coordinate Plot"):
        assert title in page
    assert 'src="http' not in page


@pytest.mark.slow
def test_the_guides_search_runs_as_written(workspace: Workspace) -> None:
    guide = (REPOSITORY / "docs/guide/tuning.md").read_text(encoding="utf-8").split("\n## Stages\n")[0]
    (space,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    prepare, search = re.findall(r"^orchestrate (.*(?:--experiment|space.yaml) demo .*)$", guide, re.MULTILINE)
    (workspace.root / "space.yaml").write_text(space)
    workspace.orchestrate(*prepare.split(), *TINY_MODEL).succeeded()
    words = search.replace("24", "3").replace("150K", "1K").split()
    process = workspace.orchestrate(*words, "--seeds=1").succeeded()
    assert "Trained on 1,000 tokens" in process.out
    study = workspace.run_folder("demo-tune")
    assert len(list((study / "trials").iterdir())) == 3
    for path in re.findall(r"^\| `([^`]+)`", guide, re.MULTILINE):
        assert (study / path.replace("0007", "0002")).exists(), path


def test_missing_packages_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    request = Request(Path("space.yaml"), experiment="E")
    with pytest.raises(CommandError, match="-m pip install 'optuna>="):
        run(request)


def test_counts_may_have_units() -> None:
    assert [search_space.count(text) for text in (20, "20M", "1.5B", "300k", None)] == [
        20, 20_000_000, 1_500_000_000, 300_000, None,
    ]  # fmt: skip
