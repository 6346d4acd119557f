"""The suite's machine-dependent parts pass on another machine: processor, cores, locale, time zone, home, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_held_back import stand_in
from workspace import REPOSITORY, TRAINER, Workspace

PROCESSOR = "Another Processor 4000"
ELSEWHERE = {"LC_ALL": "C", "TZ": "XYZ-5:45", "PROCESSOR": PROCESSOR, "TERM": "dumb", "COLUMNS": "40", "NO_COLOR": "1"}
# What reads of the machine, the terminal, the clock or signals, and takes a few seconds.
SELECTED = [
    "test_arguments.py::test_ctrl_c_during_imports_ends_with_a_sentence",
    "test_adverse_machine.py::test_a_closed_terminal_saves_the_run",
    "test_stopping.py::test_python_calls_that_list_raise_keyboard_interrupt[resume]",
    "test_doctor.py::test_a_cpu_is_ready_and_the_json_says_what_was_found",
    "test_start_screen.py",
    "test_exit_codes.py",
]
RUST = ["memory_plan::", "environment::", "speed_advice::"]


def become_another_machine() -> None:
    """Give a process one core, and ignore what `nohup` and a background job ignore."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def elsewhere(folder: Path) -> dict[str, str]:
    """The environment of another machine, on which nobody has a home."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "LANG", "USER", "LOGNAME")}
    # rustup finds its toolchains by the home.
    home = Path.home()
    rust = {"RUSTUP_HOME": str(home / ".rustup"), "CARGO_HOME": str(home / ".cargo")} | environment
    return rust | ELSEWHERE | {"LD_PRELOAD": str(stand_in(folder))}


def run(folder: Path, *command: str | Path) -> str:
    process = subprocess.run(
        [str(word) for word in command], cwd=REPOSITORY, env=elsewhere(folder), preexec_fn=become_another_machine,
        capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process.stdout


@pytest.mark.slow
def test_the_suite_passes_on_another_machine(tmp_path: Path) -> None:
    tests = [str(REPOSITORY / "tests" / name) for name in SELECTED]
    run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)


@pytest.mark.slow
def test_the_trainer_s_tests_pass_on_another_machine(tmp_path: Path) -> None:
    build = ["cargo", "test", "-p", "training", "--lib", "--locked", "--no-run", "--message-format=json"]
    built = subprocess.run(build, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    messages = (json.loads(line) for line in built.splitlines() if line.startswith("{"))
    (program,) = [line["executable"] for line in messages if line.get("executable") and line["profile"]["test"]]
    assert "test result: ok" in run(tmp_path, program, *RUST)


def test_another_machine_has_its_own_processor_and_cores(workspace: Workspace) -> None:
    config = workspace.root / "training.yaml"
    config.write_text((REPOSITORY / "configs" / "smoke_cpu.yaml").read_text())
    overrides = ["--override=model.vocab_size=300", "--override=runtime.device=cpu"]
    plan = json.loads(run(workspace.root, TRAINER, "plan", "--json", "--config", config, *overrides))
    assert plan["device"]["name"] == f"{PROCESSOR}, 1 thread"
