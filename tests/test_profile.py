"""Profiled steps: the trace as Perfetto reads it, the summary against the metrics, and what is refused."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from perfetto_trace import Trace
from workspace import REPOSITORY, TINY_MODEL, TRAINER, Workspace

FIRST, LAST = 4, 6
# Above the files of a checkpoint of this model, below the trace of forty steps.
FILE_SIZE = 700_000
SLICES = """
    select slice.id as id, slice.ts as ts, slice.dur as dur, slice.name as name, slice.category as category,
    slice.parent_id as parent, thread.name as thread from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) order by ts
"""


@pytest.fixture(scope="module")
def profiled_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A run `E` of 8 steps on two threads, of which three are profiled; evaluations and checkpoints after 3 and 6."""
    workspace = Workspace(tmp_path_factory.mktemp("profiled"), {"RAYON_NUM_THREADS": "2"})
    flags = "--steps=8 --evaluate-every=3 --checkpoint-every=3 --seq-len=256 --batch-size=8 --experiment=E".split()
    sizes = "--hidden-size=128 --intermediate-size=256".split()
    arguments = [*TINY_MODEL, *sizes, *flags, f"--profile={FIRST}-{LAST}", f"--input={workspace.write_text()}"]
    output = workspace.orchestrate(*arguments).succeeded().out
    (workspace.root / "shown.txt").write_text(output)
    return workspace


def profile_folder(workspace: Workspace) -> Path:
    return workspace.run_folder("E") / "profile"


@pytest.fixture(scope="module")
def trace(profiled_workspace: Workspace) -> Trace:
    return Trace(profile_folder(profiled_workspace) / f"trace-{FIRST}-{LAST}.json")


@pytest.fixture(scope="module")
def slices(trace: Trace) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in trace.rows(SLICES)}


def table(text: str, head: str) -> dict[str, list[float]]:
    """Return the rows of a table of the summary: a name, then numbers."""
    rows = {}
    for line in text.split(head, 1)[1].splitlines()[1:]:
        if not line:
            break
        assert len(line) <= 80, "a row fits a terminal of 80 columns"
        name, numbers = re.fullmatch(r"(.{26}) (.*)", line).groups()  # type: ignore[union-attr]
        rows[name.strip()] = [float(number) for number in re.findall(r"-?\d+\.?\d*", numbers)]
    return rows


@pytest.mark.slow
def test_perfetto_reads_every_event(
    profiled_workspace: Workspace, trace: Trace, slices: dict[int, dict[str, Any]]
) -> None:
    trace_file = json.loads((profile_folder(profiled_workspace) / f"trace-{FIRST}-{LAST}.json").read_text())
    complete = [event for event in trace_file["traceEvents"] if event["ph"] == "X"]
    assert trace.problems() == []
    assert len(slices) == len(complete) > 100


def test_each_step_has_its_passes_layers_and_operations(slices: dict[int, dict[str, Any]]) -> None:
    def path(row: dict[str, Any]) -> str:
        parent = slices.get(row["parent"])
        return f"{path(parent)}/{row['name']}" if parent else str(row["name"])

    paths = [path(row) for row in slices.values() if row["thread"] == "training loop"]
    for step in range(FIRST, LAST + 1):
        for below in (
            "data_wait",
            "micro_batch/forward/embedding::forward",
            "micro_batch/forward/layer 0/attention/qkv/linear::forward",
            "micro_batch/forward/layer 1/attention/attention::forward",
            "micro_batch/forward/layer 1/mlp/down/linear::forward",
            "micro_batch/head/head_cross_entropy::forward_backward",
            "micro_batch/backward/layer 1/mlp backward/gate_up/linear::backward_weight",
            "micro_batch/backward/layer 0/attention backward/attention::backward",
            "optimizer/grad_norm::forward",
        ):
            assert f"step {step}/{below}" in paths, f"step {step}/{below}"
    assert f"step {LAST}/evaluation" in paths
    assert f"step {LAST}/save" in paths
    assert f"step {FIRST}/save" not in paths


def test_the_threads_of_the_pool_show_their_tasks(slices: dict[int, dict[str, Any]]) -> None:
    tasks = [row for row in slices.values() if row["category"] == "task"]
    assert {row["thread"] for row in tasks} == {"trainer-0", "trainer-1"}
    operations = [row for row in slices.values() if row["category"] == "operation"]
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in operations:
        spans.setdefault(row["name"], []).append((row["ts"], row["ts"] + row["dur"]))
    for row in tasks:
        is_inside = any(start <= row["ts"] and row["ts"] + row["dur"] <= end for start, end in spans[row["name"]])
        assert is_inside, row


def test_the_parts_add_up_to_the_steps_of_the_metrics(profiled_workspace: Workspace) -> None:
    summary = (profile_folder(profiled_workspace) / f"summary-{FIRST}-{LAST}.txt").read_text()
    parts = table(summary, "part, per step")
    total = parts.pop("step")[0]
    assert sum(row[0] for row in parts.values()) == pytest.approx(total, rel=0.001)
    assert {"gemm", "attention", "head_and_loss", "optimizer", "data_wait", "evaluation", "save"} <= parts.keys()
    # Save and evaluation are in the line of the step after them.
    rows = {row["step"]: row for row in profiled_workspace.metrics("E")}
    steps = sum(rows[step]["step_seconds"] for step in range(FIRST, LAST + 1))
    between = sum(
        rows[step][name] for step in range(FIRST + 1, LAST + 2) for name in ("save_seconds", "evaluation_seconds")
    )
    assert total == pytest.approx(1e3 * (steps + between) / (LAST - FIRST + 1), rel=0.02)


def test_every_part_stands_beside_its_roofline(profiled_workspace: Workspace) -> None:
    output = (profiled_workspace.root / "shown.txt").read_text()
    summary = (profile_folder(profiled_workspace) / f"summary-{FIRST}-{LAST}.txt").read_text()
    assert summary.strip() in output
    assert re.search(r"roofline: \d+\.\d+ GFLOP/s and \d+\.\d+ GB/s, measured with these threads", summary)
    for head in ("part, per step", "operation, per step"):
        rows = table(summary, head)
        for name in ("gemm", "attention", "optimizer") if head.startswith("part") else ("qkv forward", "down backward"):
            assert len(rows[name]) >= 4, rows[name]
            milliseconds, roofline, reached = rows[name][-4], rows[name][-2], rows[name][-1]
            assert reached == pytest.approx(100 * roofline / milliseconds, abs=1.5), (name, rows[name])


def test_a_profile_changes_no_bit(profiled_workspace: Workspace) -> None:
    shutil.copytree(
        profiled_workspace.run_folder("E"),
        profiled_workspace.run_folder("plain"),
        ignore=shutil.ignore_patterns("checkpoints", "profile", "*.jsonl"),
    )
    config = profiled_workspace.run_folder("plain") / "training.yaml"
    profiled_workspace.trainer("train", "--config", config).succeeded()
    assert profiled_workspace.losses("plain") == profiled_workspace.losses("E")


@pytest.fixture
def prepared_workspace(profiled_workspace: Workspace, workspace: Workspace) -> Workspace:
    """The run, not trained yet."""
    left_out = shutil.ignore_patterns("checkpoints", "profile", "*.jsonl")
    shutil.copytree(profiled_workspace.run_folder("E"), workspace.run_folder("E"), ignore=left_out)
    shutil.copy(profiled_workspace.root / "book.txt", workspace.root / "book.txt")
    return workspace


def train(workspace: Workspace, *arguments: str) -> list[str]:
    return [str(TRAINER), "train", "--config", str(workspace.run_folder("E") / "training.yaml"), *arguments]


def test_a_count_profiles_steps_after_the_first_two(prepared_workspace: Workspace) -> None:
    process = prepared_workspace.command(*train(prepared_workspace, "--profile=2")).succeeded()
    assert "profile of steps 3-4" in process.out
    assert sorted(path.name for path in profile_folder(prepared_workspace).iterdir()) == [
        "summary-3-4.txt",
        "trace-3-4.json",
    ]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("6-4", "ends before it begins"),
        ("x", "neither a number of steps"),
        ("0", "neither a number of steps"),
        ("1-200", "at most 100"),
        ("7-9", "training ends with step 8"),
        ("9", "training ends with step 8"),
    ],
)
def test_steps_that_there_are_not_are_refused(prepared_workspace: Workspace, steps: str, problem: str) -> None:
    before = sorted(prepared_workspace.run_folder("E").rglob("*"))
    prepared_workspace.command(*train(prepared_workspace, f"--profile={steps}")).refused(2, "--profile", problem)
    assert sorted(prepared_workspace.run_folder("E").rglob("*")) == before
    arguments = [*TINY_MODEL, "--steps=8", f"--profile={steps}", "--experiment=new", "--input", "book.txt"]
    prepared_workspace.orchestrate(*arguments).refused(2, "--profile", problem)
    assert not prepared_workspace.run_folder("new").exists()


def test_steps_before_a_resume_are_refused(prepared_workspace: Workspace) -> None:
    prepared_workspace.command(*train(prepared_workspace, "--max-steps=5")).succeeded()
    prepared_workspace.command(*train(prepared_workspace, "--resume", "--profile=5-6")).refused(
        2, "begins after step 5"
    )
    process = prepared_workspace.command(*train(prepared_workspace, "--resume", "--profile=6")).refused(
        2, "training ends with step 8"
    )
    assert "profile of" not in process.out
    assert (
        "profile of step 7"
        in prepared_workspace.command(*train(prepared_workspace, "--resume", "--profile=7-7")).succeeded().out
    )


def test_a_profile_without_training_is_refused(workspace: Workspace) -> None:
    workspace.orchestrate("--dataset=demo", "--profile=3", "--launch=none").refused(2, "--profile", "--launch none")


def test_a_full_disk_ends_the_profile_and_not_the_training(prepared_workspace: Workspace) -> None:
    limit = (FILE_SIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    small = [
        "--override=scheduler.total_steps=60",
        "--override=model.hidden_size=32",
        "--override=model.intermediate_size=64",
    ]
    process = subprocess.run(
        train(prepared_workspace, *small, "--profile=5-60"), cwd=prepared_workspace.root,
        env=prepared_workspace.environment, text=True, capture_output=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip
    assert process.returncode == 1, process.stdout + process.stderr
    assert "trace-5-60.json: File too large" in process.stderr
    assert prepared_workspace.checkpoints("E")[-1] == "step-00000060"
    assert list(profile_folder(prepared_workspace).iterdir()) == []


@pytest.mark.slow
def test_the_guides_profile_runs_as_written(workspace: Workspace) -> None:
    guide = (REPOSITORY / "docs/guide/tuning.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^orchestrate .*--profile.*$", guide, re.MULTILINE)
    output = workspace.orchestrate(*command.split()[1:], *TINY_MODEL).succeeded().out
    (guide_output,) = re.findall(r"```text\n(profile of.*?)```", guide, re.DOTALL)
    for head in ("part, per step", "operation, per step"):
        guide_rows, actual_rows = table(guide_output, head), table(output, head)
        assert guide_rows.keys() <= actual_rows.keys() | {"data_wait"}
    for path in re.findall(r"`(runs/profiled/profile/[^`]+)`", guide):
        assert (workspace.root / path).is_file(), path
