"""No name, setting or text controls the terminal that shows it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace

# Clears the screen, sets the title, opens a C1 sequence, reverses the direction of text, overwrites the line.
HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b2J\u202e\u2066b\rc"
ESCAPED = "a\\u{1b}[2J\\u{1b}]0;title\\u{7}\\u{9b}2J\\u{202e}\\u{2066}b\\u{d}c"
PROGRAMS = {"orchestrate": ORCHESTRATE, "transformer-candle": TRAINER}


@pytest.fixture(scope="module")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    text = workspace.write_text(characters=40_000)
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=4", "--experiment=talk").succeeded()
    return workspace


def on_a_terminal(workspace: Workspace, *command: str | Path) -> str:
    """Return what a program prints where stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(word) for word in command], cwd=workspace.root, env={**workspace.environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # Linux raises it once the program has closed the terminal
        pass
    finally:
        os.close(ours)
        process.wait(timeout=60)
    return output.decode()


def obeyed(output: str) -> list[str]:
    """Return the parts of the output that would control the terminal; our programs print only colours and lines."""
    return [part for part in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\u2066", "b\rc") if part in output]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--config", f"{HOSTILE}.yaml"],
        ["plan", "--config=runs/talk/training.yaml", "--override", f"data.text_column={HOSTILE}: x"],
        ["plan", "--config=runs/talk/training.yaml", "--override", f"data.{HOSTILE}=1"],
        ["evaluate", "--experiment=talk", "--input", HOSTILE],
        ["evaluate", "--experiment", HOSTILE],
        ["evaluate", "--checkpoint", HOSTILE],
        ["generate", "--experiment=talk", "--prompt-file", HOSTILE],
        ["generate", "--experiment=talk", "--prompt=x", "--device", HOSTILE],
        ["validate-data", HOSTILE],
        [HOSTILE],
        [f"--{HOSTILE}"],
    ],
    ids=lambda command: command[0].replace(HOSTILE, "hostile") + str(len(command)),
)
def test_errors_escape_what_they_quote(trained_workspace: Workspace, program: Path, command: list[str]) -> None:
    assert trained_workspace.command(program, *command).code in (2, 3)
    for output in (
        trained_workspace.command(program, *command).err,
        on_a_terminal(trained_workspace, program, *command),
    ):
        assert obeyed(output) == []
        assert "2J" in output


@pytest.mark.parametrize("launch", ["process", "bindings"])
def test_a_run_escapes_the_names_that_it_shows(workspace: Workspace, launch: str) -> None:
    text = workspace.write_text(f"{HOSTILE}/book.txt", characters=40_000)
    flags = [*TINY_MODEL, "--input", str(text.relative_to(workspace.root)), "--steps=4", f"--launch={launch}"]
    folder = workspace.root / f"run{HOSTILE}"
    output = on_a_terminal(workspace, ORCHESTRATE, *flags, "--experiment=named", "--run-dir", folder)
    assert "What it learnt" in output, output
    assert obeyed(output) == []
    assert ESCAPED in output
    assert (folder / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_text_is_exact_in_a_pipe_and_escaped_on_a_terminal(trained_workspace: Workspace, program: Path) -> None:
    ask: list[str | Path] = [
        program,
        "generate",
        "--experiment=talk",
        "--max-tokens=2",
        "--temperature=0",
        "--prompt",
        f"{HOSTILE}\n\tx",
    ]
    assert (
        trained_workspace.command(*ask).succeeded().out.startswith(f"{HOSTILE}\n\tx".replace("\r", "\n"))
    )  # read as text
    output = on_a_terminal(trained_workspace, *ask).replace("\r\n", "\n")
    assert output.startswith(f"{ESCAPED}\n\tx")
    assert obeyed(output) == []
    answer = on_a_terminal(trained_workspace, *ask, "--json")
    assert obeyed(answer) == []
    assert json.loads(answer)["prompt"] == f"{HOSTILE}\n\tx"
