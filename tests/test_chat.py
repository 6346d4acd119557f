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
def chat_workspace(workspace: Workspace, pretrained: Path) -> Workspace:
    """A workspace with the run `chat`, whose context is 64 tokens."""
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = ["--experiment=chat", "--steps=4", "--lora-rank=4", *SMALL]
    output = workspace.orchestrate("finetune", "--model", pretrained, "--input", rows, *flags).succeeded().out
    next_commands = output[output.index("What to type next") :]
    assert "orchestrate chat chat" in next_commands
    assert "export chat --format gguf --merge" in next_commands
    assert "--prompt" not in next_commands
    return workspace


def test_a_conversation_works_on_a_terminal(chat_workspace: Workspace) -> None:
    with on_terminal(chat_workspace, *CHAT) as terminal:
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
    with on_terminal(chat_workspace, *CHAT) as terminal:
        terminal.wait_for(READY)
        terminal.press("\x04")
        assert terminal.wait_for_end() == 0, terminal.text
    with on_terminal(chat_workspace, *CHAT) as terminal:
        terminal.wait_for(READY)
        terminal.press("half a line\x03")
        assert terminal.wait_for_end() == 130, terminal.text
        assert "stopped by Ctrl-C" in terminal.text and "Traceback" not in terminal.text
        assert terminal.modes_now() == terminal.modes


def test_ctrl_c_ends_an_answer_and_not_the_conversation(chat_workspace: Workspace) -> None:
    endless = [*CHAT[:4], "--max-tokens=1000000", "--temperature=5", "--seed=3"]
    template = chat_workspace.root / "long.jinja"
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
    with on_terminal(
        chat_workspace, chat_workspace.python, "-c", script, *endless[1:], f"--chat-template={template}"
    ) as terminal:
        terminal.wait_for(READY)
        terminal.press("Hello\n")
        terminal.wait_for("(stopped)")
        terminal.press("/exit\n")
        assert terminal.wait_for_end() == 0, terminal.text


def test_what_cannot_be_talked_with_is_refused(chat_workspace: Workspace, pretrained: Path) -> None:
    chat = ["chat", "--device=cpu", "--once=Hi"]
    chat_workspace.orchestrate(*chat, "chat", "--experiment=chat").refused(2, "say one thing to chat with")
    chat_workspace.orchestrate(*chat, "nobody").refused(2, 'there is no experiment "nobody"')
    chat_workspace.orchestrate(*chat, "chat", "--temperature=hot").refused(2, "--temperature hot is not a number")
    chat_workspace.orchestrate(*chat, "chat", "--top-p=2").refused(2, "top_p")
    long = "x y z " * 60
    chat_workspace.orchestrate("chat", "chat", "--device=cpu", f"--once={long}").refused(2, "the model's context of 64")
    chat_workspace.orchestrate("chat", "chat", "--device=cpu", "--once=\ufdd0").refused(2, "noncharacters")
    bare = chat_workspace.root / "bare"
    bare.mkdir()
    for file in pretrained.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    chat_workspace.orchestrate(*chat, "--checkpoint=bare").refused(2, "has no chat template", "generate", "chatml")
    chat_workspace.orchestrate(*chat, "--checkpoint=bare", "--chat-template=chatml").succeeded()


def test_unknown_commands_are_answered_without_the_model(chat_workspace: Workspace) -> None:
    words = " ".join(str(word) for word in CHAT)
    process = chat_workspace.command("sh", "-c", f"printf '/help\\n/save it\\n/exit\\n' | {words}").succeeded()
    assert process.out == ""
    assert "note: there is no /save: /reset starts" in process.err
    assert "note: /reset starts" in process.err


def test_a_script_gets_an_answer_per_line(chat_workspace: Workspace) -> None:
    words = " ".join(str(word) for word in CHAT)
    single_answer = chat_workspace.command("sh", "-c", f"{words} --once=Hello").succeeded()
    lines = chat_workspace.command("sh", "-c", f"printf 'Hello\\n\\n/reset\\nHello\\n' | {words}").succeeded()
    assert lines.out == 2 * single_answer.out
    chat_workspace.command("sh", "-c", f"printf 'H\\377\\n' | {words}").refused(2, "not UTF-8")
    assert "Traceback" not in chat_workspace.command("sh", "-c", f"printf 'Hello\\nHello\\n' | {words} | head -c 1").err
