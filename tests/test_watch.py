"""`orchestrate watch --once`: a run's state and figures, from whatever its directory holds."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from orchestrator.watch.live import Watched
from orchestrator.watch.run_directory import FollowedDirectory
from orchestrator.watch.status import State
from watched_runs import as_lines, train_row, train_rows, write_run
from workspace import ORCHESTRATE, TRAINER, Finished, Workspace

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"


def watch_once(workspace: Workspace, *words: str | Path) -> Finished:
    return workspace.orchestrate("watch", *words, "--once")


def status_of(workspace: Workspace, *words: str | Path) -> dict[str, Any]:
    value = json.loads(watch_once(workspace, *words, "--json").succeeded().out)
    assert isinstance(value, dict)
    return value


def state(workspace: Workspace, name: str = "exp") -> tuple[str, str]:
    value = status_of(workspace, name)
    return value["state"], value["detail"]


def test_every_figure_of_a_run_is_printed(workspace: Workspace) -> None:
    write_run(workspace.run_folder("exp"), train_rows(300, everything=True), checkpoints=[200, 300], best=200)
    out = watch_once(workspace).succeeded().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "progress step 300 of 1,000, 30.0 %", "loss 3.0028, smoothed 3.003", "held-out loss 3.1028 at step 300",
        "best 3.1028 at step 300", "learning rate 0.0003", "gradient norm 0.6", "bits per byte 1.100",
        "tokens/s 23,800, MFU 77.0 %", "step 2.00 s, compute 95 %", "data wait 5.0 %", "save 0.0 %",
        "tokens 1,228,800", "GPU 98 %, 2,610 MHz", "GPU memory 30.1 GB of 33.7 GB", "GPU power 561 of 575 W, 71 °C",
        "process 1.93 cores, 3.1 GB", "warning step 150: the GPU is held back by its power limit.",
        "sample of step 300", "Once upon a time", "there was a run.",
    ):  # fmt: skip
        assert line in lines, f"{line!r} is not in\n{out}"
    assert any("\u2800" < character < "\u2900" for character in out)
    assert "\x1b" not in out


def test_a_run_is_found_by_name_path_checkpoint_and_age(workspace: Workspace) -> None:
    for age, name in ((30, "old"), (10, "new"), (20, "other")):
        run = write_run(workspace.run_folder(name), train_rows(5), checkpoints=[5])
        then = time.time() - age
        os.utime(run / "metrics.jsonl", (then, then))
    other = workspace.run_folder("other")
    assert status_of(workspace)["experiment"] == "new"
    for reference in ("other", "runs/other", other, other / "checkpoints", other / "checkpoints/step-00000005",
                  other / "metrics.jsonl"):  # fmt: skip
        assert status_of(workspace, reference)["directory"] == str(other)


def test_a_run_that_never_was_is_told_with_those_there_are(workspace: Workspace) -> None:
    watch_once(workspace).refused(2, "there is no run in", str(workspace.root / "runs"))
    write_run(workspace.run_folder("first"), train_rows(5))
    write_run(workspace.run_folder("second"), train_rows(5))
    watch_once(workspace, "third").refused(2, 'there is no experiment "third"', "first", "second")
    watch_once(workspace, "runs/first/checkpoints/step-00000009").refused(
        2, "no file or directory", "the newest runs are: "
    )
    watch_once(workspace, "nowhere/first").refused(2, f"no file or directory {workspace.root / 'nowhere/first'}")
    watch_once(workspace, workspace.root).refused(2, "is no run directory", "metrics.jsonl")
    workspace.orchestrate("watch", "first", "--json").refused(2, "--once")
    workspace.orchestrate("watch", "first", "--interval=0").refused(2, "--interval")


def test_the_state_follows_lock_end_and_checkpoints(workspace: Workspace) -> None:
    run = workspace.run_folder("exp")
    run.mkdir(parents=True)
    assert state(workspace) == ("not started", "")
    write_run(run, [])
    assert state(workspace) == ("not started", "")
    owner = json.dumps({"pid": 4242, "host": os.uname().nodename})
    (run / ".trainer.lock").write_text(owner)
    with (run / ".trainer.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state(workspace) == ("starting", "process 4242 on this machine")
        write_rows(run, train_rows(9))
        (run / ".trainer.lock").write_text(owner)
        assert state(workspace) == ("running", "process 4242 on this machine")
    assert state(workspace) == ("killed", "or failed after step 9")
    assert status_of(workspace)["warnings"] == ["there is no checkpoint: the run has to start again"]
    write_run(run, train_rows(9), checkpoints=[5])
    assert state(workspace) == ("killed", "or failed after step 9")
    assert status_of(workspace)["warnings"] == ["--resume starts from step 5 and repeats 4 steps"]
    for reason, expected in (
        ("stopped by SIGTERM", ("stopped", "by SIGTERM")),
        ("all steps are done", ("ended", "all steps are done")),
    ):
        write_rows(run, [*train_rows(9), {"kind": "end", "step": 9, "reason": reason}])
        assert state(workspace) == expected


def test_a_python_loop_that_saved_its_last_step_has_ended(workspace: Workspace) -> None:
    """It writes no line that says how it ended."""
    run = workspace.run_folder("exp")
    write_run(run, train_rows(1000), checkpoints=[1000])
    assert state(workspace) == ("ended", "all steps are done")


def test_an_error_that_ended_training_is_a_failure(workspace: Workspace) -> None:
    run = workspace.run_folder("exp")
    write_run(run, train_rows(9), checkpoints=[5])
    end = {"kind": "end", "step": 9, "reason": "training diverged at step 9", "exit_code": 6}
    write_rows(run, [*train_rows(9), end])
    assert state(workspace) == ("failed", "training diverged at step 9")
    assert status_of(workspace)["warnings"] == ["--resume starts from step 5 and repeats 4 steps"]


def test_a_run_that_waits_for_its_start_tells_the_command(workspace: Workspace) -> None:
    run = workspace.run_folder("exp")
    write_run(run, [])
    (run / "training.yaml").write_text("")
    assert state(workspace) == ("not started", "")
    assert status_of(workspace)["warnings"] == [f"to start it: orchestrate train --config {run / 'training.yaml'}"]


def test_the_last_figures_outlive_the_directory(workspace: Workspace) -> None:
    run = write_run(workspace.run_folder("exp"), train_rows(9), checkpoints=[5])
    watched = Watched(FollowedDirectory(run))
    before = watched.look()
    shutil.rmtree(run)
    after = watched.look()
    assert (after.state, after.warnings) == (State.REMOVED, [])
    assert (after.step, after.total_steps, after.latest) == (9, 1000, before.latest)


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text(as_lines(rows))


def test_asking_for_the_lock_never_holds_it(workspace: Workspace) -> None:
    """A lock that watch took for an instant would be an open file for writing, or a lock in the system's list."""
    run = write_run(workspace.run_folder("exp"), train_rows(5))
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    traced = ["strace", "-f", "-e", "trace=flock,fcntl,openat", "-o", str(workspace.root / "trace")]
    if shutil.which("strace"):
        workspace.command(*traced, ORCHESTRATE, "watch", "exp", "--once").succeeded()
        calls = [
            line for line in (workspace.root / "trace").read_text().splitlines() if str(run) in line or "exp" in line
        ]
        assert calls
        assert not [call for call in calls if "O_WRONLY" in call or "O_RDWR" in call or "O_CREAT" in call]
        assert "flock(" not in (workspace.root / "trace").read_text()
    watch_once(workspace, "exp").succeeded()
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_a_run_of_another_machine_is_judged_by_its_last_line(workspace: Workspace) -> None:
    run = write_run(workspace.run_folder("exp"), train_rows(50), checkpoints=[40])
    (run / ".trainer.lock").write_text(json.dumps({"pid": 1, "host": "gpu-7"}))
    assert state(workspace) == ("running", "on gpu-7 as far as its files tell")
    assert status_of(workspace)["eta_seconds"] == pytest.approx(950 * 2.0)
    then = time.time() - 7200
    os.utime(run / "metrics.jsonl", (then, then))
    kind, detail = state(workspace)
    assert kind == "silent"
    assert detail == "no line for 2 h 0 min on gpu-7"
    write_rows(run, [*train_rows(5), train_row(6, evaluation_seconds=6000.0)])
    os.utime(run / "metrics.jsonl", (then, then))
    assert state(workspace)[0] == "running", "an evaluation of this run takes that long"
    write_rows(run, [train_row(step, step_seconds=8.0) for step in (1000, 2000)])
    os.utime(run / "metrics.jsonl", (then, then))
    assert state(workspace)[0] == "running", "a line of every thousandth step comes that seldom"
    (run / ".trainer.lock").unlink()
    assert state(workspace) == ("running", "on another machine as far as its files tell")


def test_shares_count_what_happens_between_lines(workspace: Workspace) -> None:
    """A line every tenth step: its step's time is one step's, saving and evaluating are those of ten."""
    rows = [train_row(step, save_seconds=5.0, evaluation_seconds=0.0) for step in range(10, 110, 10)]
    write_run(workspace.run_folder("exp"), rows)
    value = status_of(workspace)
    assert value["seconds_per_step"] == pytest.approx(2.0 + 0.5)
    assert value["shares"] == pytest.approx(
        {"compute": 1.9 / 2.5, "data_wait": 0.1 / 2.5, "save": 0.2, "evaluation": 0}
    )


def test_positions_are_shown_where_some_have_no_target(workspace: Workspace) -> None:
    """Of conversations only what the assistant says is a target."""
    write_run(workspace.run_folder("exp"), [train_row(step, positions_per_second=95_200.0) for step in range(1, 11)])
    assert "23,800 (95,200 positions/s), MFU 77.0 %" in watch_once(workspace).succeeded().out
    assert status_of(workspace)["positions_per_second"] == 95_200.0


@pytest.mark.slow
def test_several_ranks_are_shown_with_the_slowest(workspace: Workspace) -> None:
    times = {"exchange_seconds": 0.2, "slowest_rank": 3, "slowest_rank_seconds": 1.7, "median_rank_seconds": 1.0}
    compute = {"rank_compute_seconds": [1.0, 1.1, 0.9, 1.5]}
    rows = [train_row(1, **times, rank_compute_seconds=[9.0, 1.0])]
    rows += [train_row(step, **times, **compute) for step in range(2, 20)]
    usage = {"time": 1.7e9, "rss_bytes": 4_000_000_000, "cpu_cores": 3.5, "swap_bytes": 0}
    rows.append({"kind": "utilization", "step": 19, **usage, "max_rank_rss_bytes": 1_100_000_000, "largest_rank": 2})
    run = write_run(workspace.run_folder("exp"), rows)
    value = status_of(workspace)
    assert value["ranks"] == {
        "count": 4, "compute_seconds": [1.0, 1.1, 0.9, 1.5], "slowest": 3, "slowest_host": None,
        "slowest_over_median": 1.5,
    }  # fmt: skip
    assert value["shares"]["exchange"] == pytest.approx(0.1)
    assert sum(value["shares"].values()) == pytest.approx(1.0)
    (run / "environment.json").write_text(json.dumps({"hosts": ["a", "a", "b", "b"]}))
    assert status_of(workspace)["ranks"]["slowest_host"] == "b"
    lines = [" ".join(line.split()) for line in watch_once(workspace).succeeded().out.splitlines()]
    assert "exchange 10.0 % of 4 ranks" in lines
    assert "ranks 3.50 cores, 4.0 GB, at most 1.1 GB each" in lines
    assert "slowest rank 3 on b, 1.50 times the median" in lines
    values: list[object] = [[], {}, "x", ["x"], [True], [0.0, 0.0]]
    for bad_value in values:
        write_rows(run, [train_row(1, **times, rank_compute_seconds=bad_value)])
        (run / "environment.json").write_text("[]")
        assert "Traceback" not in watch_once(workspace).succeeded().err
        status_of(workspace)
    write_rows(run, train_rows(3))
    assert status_of(workspace)["ranks"] is None


@pytest.mark.parametrize(
    ("damage", "config"),
    [
        ("", "{}"), ("\n\n", "not json"), ("not json\n", "[]"), ('{"kind":"train","step":1', "{}"),
        ("\x00" * 5000, "{}"),
        ('{"kind":"train","step":1}\n', '{"runtime": 3, "scheduler": {"total_steps": "x"}}'),
        ('{"kind":"evaluation","step":1,"loss":"x"}\n{"kind":"sample","step":1}\n{"kind":"advice","step":1}\n'
         '{"kind":"utilization","step":1,"gpu_utilization":"x"}\n{"kind":"end","step":1}\n', "[]"),
    ],
    ids=["empty", "blank", "text", "torn", "zeros", "bare", "fields"],
)  # fmt: skip
def test_any_content_of_metrics_and_config_is_survived(workspace: Workspace, damage: str, config: str) -> None:
    run = write_run(workspace.run_folder("exp"), [])
    (run / "metrics.jsonl").write_text(damage)
    (run / "resolved_config.json").write_text(config)
    assert "Traceback" not in watch_once(workspace).succeeded().err
    status_of(workspace)


def test_a_file_that_cannot_be_read_is_a_sentence(workspace: Workspace) -> None:
    run = workspace.run_folder("exp")
    (run / "metrics.jsonl").mkdir(parents=True)
    watch_once(workspace).refused(2, "cannot read", "metrics.jsonl", "Is a directory")
    (run / "metrics.jsonl").rmdir()
    os.mkfifo(run / "metrics.jsonl")
    watch_once(workspace).refused(2, "metrics.jsonl", "a named pipe")
    (run / "metrics.jsonl").unlink()
    write_run(run, train_rows(5))
    run.chmod(0)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--"]
    if os.geteuid() != 0:
        watch_once(workspace, run).refused(2, "cannot read", "Permission denied")
    elif shutil.which("setpriv") and subprocess.run([*nobody, str(TRAINER), "--version"], check=False).returncode == 0:
        command: list[str | Path] = [*nobody, ORCHESTRATE, "watch", run, "--once"]
        workspace.command(*command).refused(2, "cannot read", "Permission denied")
    run.chmod(0o755)


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_runs_of_older_versions_are_shown(workspace: Workspace, version: str) -> None:
    run = workspace.run_folder(version)
    shutil.copytree(GOLDEN / version / "run", run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    value = status_of(workspace)
    assert value["step"] == max(row["step"] for row in rows)
    assert value["checkpoint"]["path"].startswith(str(run))


def test_text_goes_to_an_ascii_stdout(workspace: Workspace) -> None:
    write_run(workspace.run_folder("exp"), train_rows(300, everything=True))
    narrow = Workspace(workspace.root, {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"})
    out = watch_once(narrow).succeeded().out
    assert out.isascii()
    assert "****" in out
