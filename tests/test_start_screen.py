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
        process = workspace.orchestrate().succeeded()
        lines = process.out.splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, process.out
        for word in ("--dataset demo", "--input", "--dataset HuggingFaceFW", "finetune", "watch", "doctor", "--help"):
            assert word in process.out
        assert process.err == ""
    assert list(workspace.root.iterdir()) == []


def test_every_command_of_the_start_screen_exists(workspace: Workspace) -> None:
    workspace.extra_environment["COLUMNS"] = "200"
    screen = workspace.orchestrate().out
    command_names = set(re.findall(r"^  orchestrate ([a-z]+)", screen, re.MULTILINE))
    assert command_names == {"finetune", "watch", "runs", "generate", "doctor"}
    assert command_names <= cli.COMMANDS
    options = set(re.findall(r"(--[a-z-]+)", screen))
    help_text = "".join(workspace.orchestrate(*command, "--help").out for command in ([], ["finetune"], ["generate"]))
    assert all(option in help_text for option in options)


def test_a_start_screen_that_nobody_reads_is_no_error(workspace: Workspace) -> None:
    for redirected in ("| true", ">&-"):
        process = workspace.command("bash", "-c", f"set -o pipefail; {ORCHESTRATE} {redirected}")
        assert "Traceback" not in process.err
        assert process.code in (0, 1)


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


@pytest.mark.parametrize(("failure", "code", "message"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["_with_resume_values", "app"])
def test_every_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
    failure: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> None:
        raise failure

    monkeypatch.setattr(cli, place, fail)
    assert cli._run(["doctor"]) == code
    output = capfd.readouterr().err
    assert output.startswith("orchestrate: ") and output.count("\n") == 1
    assert message in output
    assert ("a bug" in output) == ("a bug" in message)


def test_an_incomplete_package_is_one_sentence(workspace: Workspace) -> None:
    script = "import sys; sys.modules['orchestrator.cli'] = None; from orchestrator.__main__ import main; main()"
    workspace.command(workspace.python, "-c", script).refused(1, "the package is not complete", "make build")


def test_ignored_signals_do_not_reach_programs_of_tests(workspace: Workspace) -> None:
    """What `nohup` and a background job ignore would be ignored by every program that a test starts."""
    script = "import signal; print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)])"
    assert workspace.command(workspace.python, "-c", script).succeeded().out.split() == str(["SIG_DFL"] * 3).split()
    output = workspace.command("grep", "SigIgn", "/proc/self/status").succeeded().out
    ignored = int(output.split()[1], 16)
    assert not any(ignored & 1 << (number - 1) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
