"""`orchestrate watch` on a terminal, beside a run that trains, is killed, resumed, moved and removed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from emulated_terminal import EmulatedTerminal, on_terminal
from test_interrupt_and_resume import wait_for_line
from watched_runs import train_rows, write_run
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace

NAME = "--experiment=watched"
ENDLESS = [
    f"--override={key}=1000000"
    for key in ("scheduler.total_steps", "runtime.checkpoint.every_n_steps", "runtime.evaluation.every_n_steps")
]
WATCH: list[str | Path] = [ORCHESTRATE, "watch", "--interval=0.2"]


def start(workspace: Workspace) -> subprocess.Popen[str]:
    """Start a run without end, and wait until it is past its only checkpoint, of step 20."""
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=20", "--evaluate-every=10", NAME).succeeded()
    return resume(workspace)


def resume(workspace: Workspace) -> subprocess.Popen[str]:
    """Resume the run. It prints into a file: a pipe that nobody reads would stop it."""
    log, config = workspace.root / "train.log", workspace.run_folder("watched") / "training.yaml"
    log.write_text("")
    into_log = ["bash", "-c", 'exec "$@" >> train.log 2>&1', "bash"]
    trainer = workspace.start(*into_log, TRAINER, "train", "--config", config, "--resume", *ENDLESS)
    deadline = time.monotonic() + 120
    while "\nstep " not in log.read_text():
        assert trainer.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return trainer


def settle(trainer: subprocess.Popen[str]) -> None:
    trainer.communicate(timeout=120)


def test_the_panel_follows_a_run_to_its_removal(workspace: Workspace) -> None:
    trainer = start(workspace)
    run = workspace.run_folder("watched")
    with on_terminal(workspace, *WATCH, "watched") as terminal:
        try:
            names = {path.name for path in run.iterdir()}
            screen = terminal.wait_for(f"watched: running, process {trainer.pid} on this machine", "checkpoint    step")
            assert "loss: training, smoothed, and held-out" in screen
            assert {path.name for path in run.iterdir()} == names
            trainer.kill()
            settle(trainer)
            terminal.wait_for("watched: killed or failed after step", "--resume starts from step 20")
            trainer = resume(workspace)
            terminal.wait_for(f"watched: running, process {trainer.pid}")
            trainer.send_signal(signal.SIGINT)
            settle(trainer)
            terminal.wait_for("watched: stopped")
            trainer = resume(workspace)
            terminal.wait_for(f"watched: running, process {trainer.pid}")
            elsewhere = workspace.root / "elsewhere"
            run.rename(elsewhere)
            terminal.wait_for("elsewhere: ")
            settle(trainer)
            assert trainer.returncode == 1
            # The headline has no room for all of the reason.
            terminal.wait_for("elsewhere: failed", "`--resume`")
            shutil.rmtree(elsewhere)
            terminal.wait_for("elsewhere: removed", "runs/watched is now")
            assert terminal.process.poll() is None
            leave(terminal, "q")
        finally:
            trainer.kill()
            settle(trainer)


def leave(terminal: EmulatedTerminal, keys: str) -> None:
    """Leave by a key: exit code 0, and the terminal as it was."""
    terminal.press(keys)
    assert terminal.wait_for_end() == 0
    assert terminal.modes_now() == terminal.modes
    assert b"\x1b[?1049l" in terminal.written
    assert b"Traceback" not in terminal.written


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(workspace: Workspace, number: signal.Signals, code: int) -> None:
    write_run(workspace.run_folder("done"), train_rows(50))
    with on_terminal(workspace, *WATCH, "done") as terminal:
        terminal.wait_for("done: ", "leaves")
        terminal.process.send_signal(number)
        assert terminal.wait_for_end() == code
        assert terminal.modes_now() == terminal.modes
        assert b"\x1b[?1049l" in terminal.written
        assert b"Traceback" not in terminal.written


@pytest.mark.parametrize("keys", ["q", "Q", "\x03", "\x04"], ids=["q", "Q", "Ctrl-C", "Ctrl-D"])
def test_a_key_leaves_the_terminal_as_it_was(workspace: Workspace, keys: str) -> None:
    write_run(workspace.run_folder("done"), train_rows(50))
    with on_terminal(workspace, *WATCH, "done") as terminal:
        terminal.wait_for("done: ", "leaves")
        leave(terminal, keys)


def test_a_new_run_in_place_of_a_removed_one_is_shown(workspace: Workspace) -> None:
    run = workspace.run_folder("again")
    write_run(run, train_rows(50))
    with on_terminal(workspace, *WATCH, "again") as terminal:
        terminal.wait_for("step 50")
        shutil.rmtree(run)
        terminal.wait_for("again: removed", "step 50")
        write_run(run, train_rows(7))
        terminal.wait_for("step 7")


def test_the_panel_appears_before_the_run_has_a_line(workspace: Workspace) -> None:
    run = workspace.run_folder("early")
    run.mkdir(parents=True)
    (run / "training.yaml").write_text("")
    with on_terminal(workspace, *WATCH, "early") as terminal:
        terminal.wait_for("early: not started", "no values yet")
        write_run(run, train_rows(9))
        terminal.wait_for("step 9")


def test_what_cannot_be_read_is_told_until_it_can(workspace: Workspace) -> None:
    run = workspace.run_folder("odd")
    (run / "metrics.jsonl").mkdir(parents=True)
    with on_terminal(workspace, *WATCH, "odd") as terminal:
        terminal.wait_for("cannot read", "Is a directory")
        (run / "metrics.jsonl").rmdir()
        write_run(run, train_rows(9))
        terminal.wait_for("step 9", without="cannot read")


@pytest.mark.parametrize(
    ("columns", "lines", "words"),
    [
        (30, 8, ["step 300"]),
        (80, 24, ["step 300", "held-out loss", "learning rate", "gradient norm", "tokens/s", "data wait", "GPU memory",
                  "checkpoint", "power limit", "leaves"]),
        (120, 40, ["step 300", "held-out loss", "╭─ learning rate", "╭─ gradient norm", "╭─ tokens/s", "GPU power",
                   "process", "evaluation", "directory", "power limit", "sample of step 300", "Once upon a time"]),
        (200, 60, ["bits per byte", "╭─ machine", "best kept", "Once upon a time"]),
    ],
)  # fmt: skip
def test_the_panel_fits_its_terminal(workspace: Workspace, columns: int, lines: int, words: list[str]) -> None:
    write_run(workspace.run_folder("sized"), train_rows(300, everything=True), checkpoints=[200, 300], best=200)
    with on_terminal(workspace, *WATCH, "sized", columns=columns, lines=lines) as terminal:
        terminal.wait_for(*words)
        terminal.resize(64, 22)
        terminal.wait_for("sized: ", "leaves", "gradient norm")


def test_without_unicode_the_panel_is_ascii(workspace: Workspace) -> None:
    write_run(workspace.run_folder("ascii"), train_rows(300, everything=True))
    with on_terminal(workspace, *WATCH, "ascii", PYTHONIOENCODING="ascii") as terminal:
        screen = terminal.wait_for("held-out (o)", "leaves")
        assert screen.replace("°", "").isascii()
        assert "***" in screen


def test_a_text_cannot_control_the_terminal(workspace: Workspace) -> None:
    hostile = "a\x1b[2J\x1b]0;title\x07\x9b2J\u202eb\rc"
    rows = [*train_rows(5), {"kind": "sample", "step": 5, "prompt": hostile, "text": hostile},
            {"kind": "advice", "step": 5, "text": hostile}, {"kind": "end", "step": 5, "reason": hostile}]  # fmt: skip
    write_run(workspace.run_folder("hostile"), rows)
    with on_terminal(workspace, *WATCH, "hostile", columns=160, lines=50) as terminal:
        terminal.wait_for("\\u{1b}[2J", "sample of step 5")
        for part in (b"\x1b[2J", b"\x1b]0;title", b"\x07", "\u202e".encode(), b"b\rc"):
            assert part not in terminal.written


def test_a_dumb_terminal_gets_plain_lines(workspace: Workspace) -> None:
    write_run(workspace.run_folder("done"), train_rows(50), checkpoints=[50])
    with on_terminal(workspace, *WATCH, "done", TERM="dumb") as terminal:
        assert terminal.wait_for_end() == 0
        assert b"\x1b" not in terminal.written
        assert b"step 50" in terminal.written


def test_a_pipe_gets_a_line_for_each_change_until_the_end(workspace: Workspace) -> None:
    trainer = start(workspace)
    watch = workspace.start(*WATCH, "watched")
    try:
        wait_for_line(watch, "watched: running")
        wait_for_line(watch, "watched: running, process")
    finally:
        trainer.kill()
        settle(trainer)
    out, _ = watch.communicate(timeout=120)
    assert "watched: killed" in out
    assert watch.returncode == 0


def test_a_closed_pipe_ends_the_lines(workspace: Workspace) -> None:
    trainer = start(workspace)
    try:
        process = workspace.command("bash", "-c", '"$@" | head -1', "bash", *WATCH, "watched")
        assert process.succeeded().out.startswith("watched: running")
        assert process.err == ""
        assert trainer.poll() is None
    finally:
        trainer.kill()
        settle(trainer)


def test_a_closed_terminal_ends_the_panel(workspace: Workspace) -> None:
    write_run(workspace.run_folder("done"), train_rows(50))
    without_hangup = ["bash", "-c", 'trap "" HUP; exec "$@"', "bash"]
    with on_terminal(workspace, *without_hangup, *WATCH, "done") as terminal:
        terminal.wait_for("done: ", "leaves")
        terminal.close()
        assert terminal.process.wait(timeout=60) == 0


def test_the_metrics_of_a_run_hold_what_the_panel_reads(workspace: Workspace) -> None:
    """The keys that watch reads are those that the trainer writes."""
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=6", "--evaluate-every=3", "--experiment=e").succeeded()
    status = json.loads(workspace.orchestrate("watch", "e", "--once", "--json").succeeded().out)
    assert (status["state"], status["detail"]) == ("ended", "all steps are done")
    assert (status["step"], status["total_steps"], status["progress"]) == (6, 6, 1.0)
    train, evaluations = workspace.metrics("e"), workspace.metrics("e", "evaluation")
    assert status["train"] == train[-1]
    assert status["evaluation"] == evaluations[-1]
    assert status["best_evaluation"] == min(evaluations, key=lambda row: float(row["loss"]))
    assert status["checkpoint"]["path"] == str(workspace.run_folder("e") / "checkpoints" / "step-00000006")
    waits, steps = (sum(row[key] for row in train) for key in ("data_wait_seconds", "step_seconds"))
    between = status["shares"].get("save", 0) + status["shares"].get("evaluation", 0)
    assert status["shares"]["data_wait"] == pytest.approx(waits / steps * (1 - between))
    assert sum(status["shares"].values()) == pytest.approx(1)
    assert Path(status["directory"]) == workspace.run_folder("e")
