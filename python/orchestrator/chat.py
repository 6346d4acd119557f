"""`orchestrate chat`: a conversation with a fine-tuned model, in the terminal or line by line from a script."""

from __future__ import annotations

import datetime
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import _native, converted_adapters, signals, terminal
from orchestrator.adapters import base_folder, has_adapters
from orchestrator.arguments import MAX_INTEGER
from orchestrator.command_error import CommandError
from orchestrator.model_source import Source
from orchestrator.paths import is_utf8, shown
from orchestrator.screen import note, step
from orchestrator.signals import Stopped

PROMPT = "> "
EXIT, RESET, COMMANDS = "/exit", "/reset", "/help"
COMMAND = re.compile(r"/[a-z?]+( .*)?")
"""What is a command and no message; a path has another slash."""
HELP = "/reset starts a new conversation, /exit or Ctrl-D ends; Ctrl-C ends an answer"


@dataclass(frozen=True)
class Request:
    """The options of `orchestrate chat`."""

    source: Source
    once: str | None
    system: str | None
    chat_template: Path | None
    device: str
    max_tokens: int
    sampling: dict[str, Any]
    """The sampling settings that were typed, as keyword arguments of `ChatModel.reply`."""


@dataclass
class Conversation:
    """A model, and the messages of the conversation with it so far."""

    model: _native.ChatModel
    request: Request
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, show: Callable[[str], None]) -> str | None:
        """Generate the answer to a message and show it piece by piece; return why it ended early, if it did.

        An answer that fails or is stopped before its first word leaves the conversation as it was.
        """
        if not is_utf8(text):
            raise CommandError("what was said is not UTF-8")
        request, pieces = self.request, list[str]()
        system = [{"role": "system", "content": request.system}] if request.system else []
        question = {"role": "user", "content": text}

        def take(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        try:
            messages = [*system, *self.turns, question]
            reply = self.model.reply(messages, take, max_tokens=request.max_tokens, **request.sampling)
        finally:
            if pieces:
                self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]
        if not pieces:
            return "the model ends its turn without a word"
        if reply.finish_reason == "length":
            return f"the answer has the {request.max_tokens} tokens of --max-tokens"
        if reply.finish_reason == "context":
            return f"the model's context of {self.model.context} tokens is full: /reset starts a new conversation"
        return None


def sampling_settings(texts: dict[str, str | None]) -> dict[str, Any]:
    """Return the options `temperature`, `top_k`, `top_p` and `seed` of `generate` as numbers; None was not typed."""
    return {name: _number(name, text) for name, text in texts.items() if text is not None}


def run(request: Request) -> None:
    """Converse until the end of the input, or answer once."""
    model, folder = request.source.read(lambda source: (_opened(request, source), source.folder()))
    if not model.ends_turns:
        terminal.complain(
            "note: the model's chat template has no token that ends a turn, so that an answer may end only at the "
            f"{request.max_tokens} tokens of --max-tokens"
        )
    conversation = Conversation(model, request)
    if request.once is None and sys.stdin.isatty() and sys.stdout.isatty():
        _converse(conversation, folder)
        return
    try:
        _take_turns(_lines() if request.once is None else [request.once], conversation, _answer)
    except BrokenPipeError:
        return  # the reader of the answers has closed the pipe


def _take_turns(lines: Iterable[str], conversation: Conversation, answer: Callable[[Conversation, str], None]) -> None:
    """Run each line if it is a command, else answer it, until the command that ends the conversation."""
    for line in lines:
        if line == EXIT:
            return
        if line and not _obeyed(line, conversation):
            answer(conversation, line)


def _opened(request: Request, source: Source) -> _native.ChatModel:
    folder = source.folder()
    base = base_folder(folder, source.base_model)
    return _native.ChatModel(
        converted_adapters.plain(folder, base) if has_adapters(folder) else folder,
        base_model=base, chat_template=request.chat_template,
        date=datetime.datetime.now().astimezone().date().isoformat(), device=request.device,
    )  # fmt: skip


def _lines() -> Iterator[str]:
    """Yield the lines of stdin."""
    try:
        yield from map(str.strip, sys.stdin)
    except UnicodeDecodeError as error:
        raise CommandError(f"stdin is not UTF-8: {error.reason}") from error


def _number(name: str, text: str) -> float | int:
    flag, is_integer = f"--{name.replace('_', '-')}", name in ("top_k", "seed")
    try:
        number = int(text) if is_integer else float(text)
    except ValueError as error:
        raise CommandError(f"{flag} {text} is not {'an integer' if is_integer else 'a number'}") from error
    if is_integer and not 0 <= number <= MAX_INTEGER:
        raise CommandError(f"{flag} {text} is out of range: it must be from 0 to {MAX_INTEGER}")
    return number


def _answer(conversation: Conversation, text: str) -> None:
    """Answer on stdout, which gets the text as it is unless it is a terminal."""
    early = conversation.answer(text, _show)
    terminal.write("\n")
    if early is not None:
        terminal.complain(f"note: {early}")


def _converse(conversation: Conversation, folder: Path) -> None:
    """Read turns from the terminal, with the editing and the history that readline has."""
    import readline  # noqa: F401  # `input` edits lines once it is imported

    step("chat", f"{shown(folder)}, context of {conversation.model.context:,} tokens")
    note(HELP)
    with signals.without_timeout():
        _take_turns(_typed_lines(), conversation, _answer_in_terminal)


def _typed_lines() -> Iterator[str]:
    """Yield the lines that are typed at the prompt."""
    try:
        while True:
            yield input(PROMPT).strip()
    except EOFError:
        terminal.write("\n")


def _answer_in_terminal(conversation: Conversation, line: str) -> None:
    """Answer; whatever ends the answer, the conversation goes on."""
    try:
        early = conversation.answer(line, _show)
    except Stopped as stop:
        if stop.code != 128 + signal.SIGINT:
            raise
        early = "stopped"
    except (CommandError, _native.TrainerError) as error:
        early = str(error)
    terminal.write("\n")
    if early is not None:
        note(f"({early})")


def _show(piece: str) -> None:
    terminal.write(terminal.escaped(piece) if sys.stdout.isatty() else piece)


def _obeyed(line: str, conversation: Conversation) -> bool:
    """Run a line if it is a command, or say that there is no such one; return whether it was a command."""
    if not COMMAND.fullmatch(line):
        return False
    if line == RESET:
        conversation.turns.clear()
    else:
        terminal.complain(f"note: {'' if line == COMMANDS else f'there is no {line.split()[0]}: '}{HELP}")
    return True
