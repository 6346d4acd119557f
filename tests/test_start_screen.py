"""`orchestrate` alone, its version, and errors of every kind, each of which is one sentence."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from orchestrator import _native, cli
from orchestrator.command_error import CommandError
from workspace import ORCHESTRATE, Workspace

LINES, COLUMNS = 24, 80


def test_orchestrate_alone_is_a_start_screen(workspace: Workspace) -> None:
    for environment in ({}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, {"TERM": "dumb", "COLUMNS": "20"}):
        workspace.extra_environment = dict(environment)
        told = workspace.orchestrate().succeeded()
        lines = told.out.splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, told.out
        for word in ("--dataset demo", "--input", "--dataset HuggingFaceFW", "finetune", "watch", "doctor", "--help"):
            assert word in told.out
        assert told.err == ""
    assert list(workspace.root.iterdir()) == []


def test_every_command_of_the_start_screen_exists(workspace: Workspace) -> None:
    workspace.extra_environment["COLUMNS"] = "200"
    told = workspace.orchestrate().out
    named = set(re.findall(r"^  orchestrate ([a-z]+)", told, re.MULTILINE))
    assert named == {"finetune", "watch", "runs", "generate", "doctor"}
    assert named <= cli.COMMANDS
    options = set(re.findall(r"(--[a-z-]+)", told))
    known = "".join(workspace.orchestrate(*command, "--help").out for command in ([], ["finetune"], ["generate"]))
    assert all(option in known for option in options)


def test_a_start_screen_that_nobody_reads_is_no_error(workspace: Workspace) -> None:
    for redirected in ("| true", ">&-"):
        done = workspace.command("bash", "-c", f"set -o pipefail; {ORCHESTRATE} {redirected}")
        assert "Traceback" not in done.err
        assert done.code in (0, 1)


def test_both_programs_tell_their_version(workspace: Workspace) -> None:
    for flag in ("--version", "-V"):
        assert workspace.orchestrate(flag).succeeded().out == f"orchestrate {_native.__version__}\n"
        assert workspace.trainer(flag).succeeded().out.startswith(f"transformer-candle {_native.__version__}")
    assert list(workspace.root.iterdir()) == []


class Panic(BaseException):
    """As PyO3's PanicException, no Exception."""


FAILURES: list[tuple[BaseException, int, str]] = [
    (ValueError("zip() argument 2 is longer"), 1, "a bug, please report it: ValueError at test_start_screen.py:"),
    (Panic("index out of bounds"), 1, "a bug, please report it: Panic at test_start_screen.py:"),
    (RecursionError("maximum depth"), 1, "a bug, please report it"),
    (MemoryError(), 4, "no memory left"),
    (OSError(28, "No space left on device", "runs"), 1, "/runs: the disk is full: free space"),
    (_native.DataError("rows.jsonl: not UTF-8"), 3, "orchestrate: rows.jsonl: not UTF-8\n"),
    (CommandError("say what to do"), 2, "orchestrate: say what to do\n"),
    (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
]


@pytest.mark.parametrize(("failure", "code", "told"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["_with_resume_values", "app"])
def test_every_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
    failure: BaseException,
    code: int,
    told: str,
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> None:
        raise failure

    monkeypatch.setattr(cli, place, fail)
    assert cli._run(["doctor"]) == code
    printed = capfd.readouterr().err
    assert printed.startswith("orchestrate: ") and printed.count("\n") == 1
    assert told in printed
    assert ("a bug" in printed) == ("a bug" in told)


def test_an_incomplete_package_is_one_sentence(workspace: Workspace) -> None:
    script = "import sys; sys.modules['orchestrator.cli'] = None; from orchestrator.__main__ import main; main()"
    workspace.command(workspace.python, "-c", script).refused(1, "the package is not complete", "make build")


def test_ignored_signals_do_not_reach_programs_of_tests(workspace: Workspace) -> None:
    """What `nohup` and a background job ignore would be ignored by every program that a test starts."""
    script = "import signal; print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)])"
    assert workspace.command(workspace.python, "-c", script).succeeded().out.split() == str(["SIG_DFL"] * 3).split()
    shown = workspace.command("grep", "SigIgn", "/proc/self/status").succeeded().out
    ignored = int(shown.split()[1], 16)
    assert not any(ignored & 1 << (number - 1) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
