"""Rejects values that no option accepts: empty ones, bytes that are not UTF-8, integers beyond 64 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.paths import is_utf8

if TYPE_CHECKING:
    Parser = TyperCommand
else:
    Parser = object

MAX_INTEGER = 2**64 - 1
# An empty prompt generates from the start of a text.
MAY_BE_EMPTY = {"prompt"}


class _Checked(Parser):
    """A parser that checks the values first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check the arguments, then parse them."""
        _check_text(self, ctx, args)
        rest = super().parse_args(ctx, args)
        _check_integers(self, ctx)
        return rest


class Command(_Checked, TyperCommand):
    """A command whose values are checked."""


class Group(_Checked, TyperGroup):
    """A command with subcommands, whose values are checked."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with one sentence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise stopped() from interrupt


def stopped() -> CommandError:
    """Return the error of a command that Ctrl-C ended."""
    return CommandError("stopped by Ctrl-C", ExitCode.INTERRUPTED)


def _check_text(command: Parser, ctx: Any, args: list[str]) -> None:
    """Check the arguments as strings: an empty `Path` would be the current folder."""
    strings, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    for parameter in command.get_params(ctx):
        for value in _values(strings.get(parameter.name)):
            if not isinstance(value, str):
                continue
            if not value.strip() and parameter.name not in MAY_BE_EMPTY:
                raise CommandError(
                    f"{_name(parameter)} is empty: give it a value or leave it out (a shell variable that is not set "
                    "is typed as nothing)"
                )
            if not is_utf8(value):
                raise CommandError(f"{_name(parameter)} {value!r} is not UTF-8: give it, or the file, another name")


def _check_integers(command: Parser, ctx: Any) -> None:
    for parameter in command.get_params(ctx):
        for value in _values(ctx.params.get(parameter.name)):
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise CommandError(f"{_name(parameter)} {value} is too large: at most {MAX_INTEGER} is possible")


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name(parameter: Any) -> str:
    """Return an option's longest name, or an argument's."""
    names = [name for name in parameter.opts if name.startswith("-")]
    return max(names, key=len) if names else str(parameter.name).upper()
