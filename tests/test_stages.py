"""`stages` in a config: what the commands say of them, and a kill at any moment around a boundary."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from killing import KilledRun
from watched_runs import as_lines, train_row, write_run
from workspace import REPOSITORY, TINY_MODEL, Workspace

STAGES = (
    "[{steps: 9, sequence_length: 16, batch_size: 4}, "
    "{steps: 6, sequence_length: 64, sequences_per_step: 3, batch_size: 1, learning_rate: 1.0e-3}, {steps: 8}]"
)


def prepared(workspace: Workspace, *experiments: str) -> list[KilledRun]:
    """Make runs in stages over local text, and do not start them."""
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--checkpoint-every=4", "--evaluate-every=5", "--launch=none"]
    for experiment in experiments:
        workspace.orchestrate(*flags, f"--experiment={experiment}").succeeded()
        config = workspace.run_folder(experiment) / "training.yaml"
        config_text = config.read_text()
        staged = re.sub(r"(?m)^stages: null$", f"stages: {STAGES}", config_text)
        staged = re.sub(r"(?m)^  total_steps: .*$", "  total_steps: null", staged)
        staged = re.sub(r"(?m)^  max_position_embeddings: .*$", "  max_position_embeddings: 64", staged)
        config.write_text(staged)
    return [KilledRun(workspace, experiment) for experiment in experiments]


def test_a_killed_run_ends_with_the_bits_of_a_straight_one(workspace: Workspace) -> None:
    """Killed by SIGKILL after a number of lines drawn by lot, so that many kills are around the boundaries."""
    straight_run, killed_run = prepared(workspace, "straight", "killed")
    straight_run.live()
    lot, kills = random.Random(11), 0
    while killed_run.live(lot.randrange(4, 16)):
        kills += 1
    assert kills >= 3
    assert killed_run.results() == straight_run.results()
    proof = killed_run.proof()
    assert proof["problems"] == []
    left_out = sum(row["left_out_sequences"] for row in workspace.metrics("straight", "stage"))
    assert proof["components"][0].get("left_out", 0) == left_out > 0
    stages = [(row["stage"], row["sequence_length"]) for row in workspace.metrics("killed", "stage")]
    assert stages == [(0, 16), (1, 64), (2, 32)]
    lines = [line for line in straight_run.lines if ": stage " in line]
    assert [line.split(":")[1].split(",")[0] for line in lines] == [f" stage {n} of 3 begins" for n in (1, 2, 3)]
    assert any("stage 2/3" in line for line in straight_run.lines)


def test_plan_and_watch_know_the_stages(workspace: Workspace) -> None:
    (run,) = prepared(workspace, "staged")
    config = run.folder / "training.yaml"
    plan = workspace.trainer("plan", "--config", config).succeeded().out
    assert "stages     1: steps 1 to 9, 4 sequences of 16 as 4 x 1" in plan, plan
    assert "2: steps 10 to 15, 3 sequences of 64 as 1 x 3, learning rate up to 0.001" in plan, plan
    stages = json.loads(workspace.trainer("plan", "--config", config, "--json").succeeded().out)["stages"]
    assert [stage["last_step"] for stage in stages] == [9, 15, 23]
    workspace.trainer("plan", "--config", config, "--tokens", "1M").refused(2, "--tokens", "stages")
    workspace.trainer("bench", "--config", config).refused(2, "bench", "stages=null")

    workspace.trainer("train", "--config", config, "--max-steps", "12").succeeded()
    status = json.loads(workspace.orchestrate("watch", "staged", "--once", "--json").succeeded().out)
    assert (status["stage"], status["stages"], status["total_steps"]) == (1, 3, 23)
    assert "stage 2 of 3" in workspace.orchestrate("watch", "staged", "--once").succeeded().out
    report = workspace.trainer("evaluate", "--experiment", "staged", "--json").succeeded()
    assert json.loads(report.out)["tokens"] % 64 == 0, "in sequences of the checkpoint's stage"


def test_the_eta_counts_the_tokens_of_later_stages(tmp_path: Path) -> None:
    from orchestrator.watch import metrics_file, status, trainer_lock

    rows = [
        {"kind": "stage", "step": 1, "stage": 0}, train_row(1, step_seconds=9.0),
        {"kind": "stage", "step": 101, "stage": 1}, train_row(101, step_seconds=2.0),
    ]  # fmt: skip
    run = write_run(tmp_path / "run", rows)
    sizes = ((100, 16, 8), (100, 64, 4), (100, 64, 8))
    stages = [{"steps": n, "sequence_length": length, "sequences_per_step": batch} for n, length, batch in sizes]
    (run / "resolved_config.json").write_text(json.dumps({"scheduler": {"total_steps": 300}, "stages": stages}))
    file = metrics_file.MetricsFile()
    file.read(run / "metrics.jsonl", 1 << 20)
    lock = trainer_lock.TrainerLock(trainer_lock.Held.YES)
    assessment = status.assess(run, file.metrics, lock, removed=False, now=0.0)
    assert assessment.seconds_per_step == 2.0, "that of the current stage"
    assert assessment.eta == pytest.approx(2.0 * (99 + 2 * 100))
    assert as_lines(rows) == (run / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_the_guides_commands_run_as_written(workspace: Workspace) -> None:
    guide = (REPOSITORY / "docs/guide/tuning.md").read_text(encoding="utf-8").split("\n## Stages\n")[1]
    (stages,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    commands = [line.removeprefix("$ ") for line in re.findall(r"(?m)^(?:\$ )?orchestrate .*$", guide)]
    assert [command.split()[1] for command in commands] == ["--stream", "plan", "train", "validate-data"]
    prepare, plan, train, validate = (command.split()[1:] for command in commands)
    workspace.orchestrate(*prepare).succeeded()
    config = workspace.run_folder("staged") / "training.yaml"
    config.write_text(config.read_text().replace("stages: null\n", stages))
    plan_output = workspace.orchestrate(*plan).succeeded().out
    for line in re.findall(r"(?m)^(?:stages )? +\d: steps .*? alone", guide):
        assert line in plan_output, f"{line!r} is not in\n{plan_output}"
    # The whole run takes minutes: one boundary is enough.
    output = workspace.orchestrate(*train, "--max-steps", "42", timeout=600).succeeded().out
    (line,) = re.findall(r"(?m)^step 41: stage 2 of 3 begins.*$", guide)
    assert line in output
    assert "problem" not in workspace.orchestrate(*validate).succeeded().out
