"""`orchestrate chat` on a terminal and from scripts: turns, commands, what ends it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_terminal import on_terminal
from test_finetune import SMALL, pretrained, write_rows
from workspace import ORCHESTRATE, Workspace

__all__ = ["pretrained"]

CHAT: list[str | Path] = [ORCHESTRATE, "chat", "chat", "--device=cpu", "--max-tokens=8", "--temperature=0"]

READY = "Ctrl-C ends an answer\n>"


@pytest.fixture
def tuned(workspace: Workspace, pretrained: Path) -> Workspace:
    """A workspace with the run `chat`, whose context is 64 tokens."""
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = ["--experiment=chat", "--steps=4", "--lora-rank=4", *SMALL]
    told = workspace.orchestrate("finetune", "--model", pretrained, "--input", rows, *flags).succeeded().out
    next_commands = told[told.index("What to type next") :]
    assert "orchestrate chat chat" in next_commands
    assert "export chat --format gguf --merge" in next_commands
    assert "--prompt" not in next_commands
    return workspace


def test_a_conversation_on_a_terminal(tuned: Workspace) -> None:
    with on_terminal(tuned, *CHAT) as terminal:
        terminal.wait_for("context of 64 tokens", READY)
        terminal.press("Hello\n")
        terminal.wait_for("--max-tokens")
        terminal.press("/reset\n")
        terminal.press("again " * 40 + "\n")
        terminal.wait_for("leaves no room for an answer")
        terminal.press("Hi\n")
        terminal.wait_for("--max-tokens")
        terminal.press("/exit\n")
        assert terminal.wait_for_end() == 0, terminal.text
        assert terminal.modes_now() == terminal.modes
    with on_terminal(tuned, *CHAT) as terminal:
        terminal.wait_for(READY)
        terminal.press("\x04")
        assert terminal.wait_for_end() == 0, terminal.text
    with on_terminal(tuned, *CHAT) as terminal:
        terminal.wait_for(READY)
        terminal.press("half a line\x03")
        assert terminal.wait_for_end() == 130, terminal.text
        assert "stopped by Ctrl-C" in terminal.text and "Traceback" not in terminal.text
        assert terminal.modes_now() == terminal.modes


def test_ctrl_c_ends_an_answer_and_not_the_conversation(tuned: Workspace) -> None:
    endless = [*CHAT[:4], "--max-tokens=1000000", "--temperature=5", "--seed=3"]
    template = tuned.root / "long.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    script = (
        "import sys, signal, os, orchestrator.chat as chat\n"
        "show = chat._show\n"
        "def first_word(piece):\n"
        "    show(piece)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "chat._show = first_word\n"
        "from orchestrator.cli import main\n"
        "sys.argv = ['orchestrate', *sys.argv[1:]]\n"
        "main()\n"
    )
    with on_terminal(tuned, tuned.python, "-c", script, *endless[1:], f"--chat-template={template}") as terminal:
        terminal.wait_for(READY)
        terminal.press("Hello\n")
        terminal.wait_for("(stopped)")
        terminal.press("/exit\n")
        assert terminal.wait_for_end() == 0, terminal.text


def test_what_cannot_be_talked_with_is_refused(tuned: Workspace, pretrained: Path) -> None:
    chat = ["chat", "--device=cpu", "--once=Hi"]
    tuned.orchestrate(*chat, "chat", "--experiment=chat").refused(2, "say one thing to chat with")
    tuned.orchestrate(*chat, "nobody").refused(2, 'there is no experiment "nobody"')
    tuned.orchestrate(*chat, "chat", "--temperature=hot").refused(2, "--temperature hot is not a number")
    tuned.orchestrate(*chat, "chat", "--top-p=2").refused(2, "top_p")
    long = "x y z " * 60
    tuned.orchestrate("chat", "chat", "--device=cpu", f"--once={long}").refused(2, "the model's context of 64")
    tuned.orchestrate("chat", "chat", "--device=cpu", "--once=\ufdd0").refused(2, "noncharacters")
    bare = tuned.root / "bare"
    bare.mkdir()
    for file in pretrained.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    tuned.orchestrate(*chat, "--checkpoint=bare").refused(2, "has no chat template", "generate", "chatml")
    tuned.orchestrate(*chat, "--checkpoint=bare", "--chat-template=chatml").succeeded()


def test_unknown_commands_are_answered_without_the_model(tuned: Workspace) -> None:
    words = " ".join(str(word) for word in CHAT)
    done = tuned.command("sh", "-c", f"printf '/help\\n/save it\\n/exit\\n' | {words}").succeeded()
    assert done.out == ""
    assert "note: there is no /save: /reset starts" in done.err
    assert "note: /reset starts" in done.err


def test_a_script_gets_an_answer_per_line(tuned: Workspace) -> None:
    words = " ".join(str(word) for word in CHAT)
    once = tuned.command("sh", "-c", f"{words} --once=Hello").succeeded()
    lines = tuned.command("sh", "-c", f"printf 'Hello\\n\\n/reset\\nHello\\n' | {words}").succeeded()
    assert lines.out == 2 * once.out
    tuned.command("sh", "-c", f"printf 'H\\377\\n' | {words}").refused(2, "not UTF-8")
    assert "Traceback" not in tuned.command("sh", "-c", f"printf 'Hello\\nHello\\n' | {words} | head -c 1").err
