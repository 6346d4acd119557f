"""What no option takes, checked in one place: nothing at all, bytes that are not UTF-8, integers beyond 64 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.paths import is_utf8

if TYPE_CHECKING:
    Parser = TyperCommand
else:
    Parser = object

LARGEST = 2**64 - 1
# An empty prompt starts a new text.
MAY_BE_EMPTY = {"prompt"}


class _Checked(Parser):
    """What is parsed only after a look at the values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check what was typed, then parse it."""
        _check_typed(self, ctx, args)
        rest = super().parse_args(ctx, args)
        _check_sizes(self, ctx)
        return rest


class Command(_Checked, TyperCommand):
    """A command that refuses values which no option takes."""


class Group(_Checked, TyperGroup):
    """The same for the command that holds the others."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it in a sentence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise stopped() from interrupt


def stopped() -> CommandError:
    """Return the error of a command that Ctrl-C has ended."""
    return CommandError("stopped by Ctrl-C", ExitCode.INTERRUPTED)


def _check_typed(command: Parser, ctx: Any, args: list[str]) -> None:
    """Look at the words as they were typed: a `Path` of nothing is the current folder."""
    typed, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    for parameter in command.get_params(ctx):
        for value in _values(typed.get(parameter.name)):
            if not isinstance(value, str):
                continue
            if not value.strip() and parameter.name not in MAY_BE_EMPTY:
                raise CommandError(
                    f"{_name(parameter)} is empty: give it a value or leave it out (a shell variable that is not set "
                    "is typed as nothing)"
                )
            if not is_utf8(value):
                raise CommandError(f"{_name(parameter)} {value!r} is not UTF-8: give it, or the file, another name")


def _check_sizes(command: Parser, ctx: Any) -> None:
    for parameter in command.get_params(ctx):
        for value in _values(ctx.params.get(parameter.name)):
            if isinstance(value, int) and abs(value) > LARGEST:
                raise CommandError(f"{_name(parameter)} {value} is too large: at most {LARGEST} is possible")


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name(parameter: Any) -> str:
    """Return an option's longest name, or an argument's."""
    names = [name for name in parameter.opts if name.startswith("-")]
    return max(names, key=len) if names else str(parameter.name).upper()
