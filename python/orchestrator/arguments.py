"""Reads the words of a command line as people type them, and rejects values that no option accepts.

Underscores count as hyphens, `10k` is an integer, `~` is the home folder, and options of other programs are answered
with ours. Refused are empty values, bytes that are not UTF-8 and integers beyond 64 bits.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, get_args

from typer.core import TyperCommand, TyperGroup

from orchestrator import _native, habits, help_text
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.paths import is_utf8

if TYPE_CHECKING:
    BaseCommand = TyperCommand
else:
    BaseCommand = object

MAX_INTEGER = 2**64 - 1
# An empty prompt generates from the start of a text.
MAY_BE_EMPTY = {"prompt"}
# What the library that checks values says of them, and what messages say.
PLAIN_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "must be an integer",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be ": "must be ",
}
# Values that are text, in which `~` is itself.
TEXTS = {"prompt", "once", "system", "message"}


class _Parser:
    """A parser of words whose values are checked, and written as the options' types read them."""

    def __init__(self, parser: Any, command: Any, ctx: Any) -> None:
        self._parser, self._command, self._ctx = parser, command, ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def parse_args(self, args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
        """Return the values by the parameters' names, the words that are left, and the parameters in their order."""
        try:
            values, rest, order = self._parser.parse_args(args=list(args))
        except Exception as error:
            raise _explained(error, self._command, self._ctx, args) from None
        parameters = {parameter.name: parameter for parameter in self._command.get_params(self._ctx)}
        return {name: _value(parameters[name], value) for name, value in values.items()}, rest, order


class _Checked(BaseCommand):
    """A command whose words are read by `_Parser`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what the command takes."""
        help_text.write_options(self, ctx, formatter)

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the command's words."""
        return _Parser(super().make_parser(ctx), self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, then check the integers."""
        rest = super().parse_args(ctx, args)
        _check_integers(self, ctx)
        return rest


class Command(_Checked, TyperCommand):
    """A command whose values are checked."""


def _of_run(name: str) -> str | None:
    """Return what to say of a run in place of a command; none if it names no run."""
    try:
        _native.run_directory(name)
    except _native.TrainerError:
        return None
    run = quote(name)
    return f"{name} is a run: `orchestrate --resume {run}` trains on, `orchestrate watch {run}` shows it"


class Group(_Checked, TyperGroup):
    """A command with subcommands, whose values are checked."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand; underscores count as hyphens."""
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, habits.hyphenated(cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that is named, or say which one there is for what was typed."""
        if self.get_command(ctx, args[0]) is None:
            raise CommandError(_of_run(args[0]) or habits.of_command(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with one sentence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise stopped() from interrupt


def stopped() -> CommandError:
    """Return the error of a command that Ctrl-C ended."""
    return CommandError("stopped by Ctrl-C", ExitCode.INTERRUPTED)


def usage_error(error: Any) -> str:
    """Return what a Typer error says of a command line, and the command whose help lists what there is."""
    context, checked = getattr(error, "ctx", None), getattr(error, "param", None)
    text = str(error.format_message()).rstrip(".")
    for phrase, plain in PLAIN_WORDS.items():
        text = text.replace(phrase, plain)
    for choice in _choices(checked):
        # The choices are listed as words of a command line are compared.
        text = text.replace(repr(habits.hyphenated(choice)), repr(choice))
    return f"{text} (`{context.command_path if context else 'orchestrate'} --help` lists what there is)"


def _choices(parameter: Any) -> list[str]:
    """Return the values of an option whose type is an enumeration or a `Literal`; none of any other one."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    values = getattr(kind, "__members__", {}).values() or get_args(kind)
    return [str(getattr(value, "value", value)) for value in values]


def _explained(error: Exception, command: Any, ctx: Any, args: list[str]) -> Exception:
    """Return the error of an unknown option with what to type instead, any other one with the command it is of."""
    if not hasattr(error, "possibilities"):
        if getattr(error, "ctx", ctx) is None:
            error.ctx = ctx  # type: ignore[attr-defined]
        return error
    known_flags = [name for parameter in command.get_params(ctx) for name in parameter.opts if name.startswith("--")]
    name = error.option_name  # type: ignore[attr-defined]
    words = (word.partition("=")[0] for word in args)
    flag = next((word for word in words if habits.hyphenated(word) == name), name)
    return CommandError(habits.of_flag(flag, known_flags, ctx.parent and ctx.info_name))


def _value(parameter: Any, value: Any) -> Any:
    """Return what was typed for a parameter as its type reads it, checked."""
    if isinstance(value, (list, tuple)):
        return type(value)(_value(parameter, part) for part in value)
    if not isinstance(value, str):
        return value
    if not value.strip() and parameter.name not in MAY_BE_EMPTY:
        raise CommandError(
            f"{_name(parameter)} is empty: give it a value or leave it out (a shell variable that is not set is typed "
            "as nothing)"
        )
    if not is_utf8(value):
        raise CommandError(f"{_name(parameter)} {value!r} is not UTF-8: give it, or the file, another name")
    if "int" in parameter.bare_type():
        return _integer(value)
    if value.startswith("~") and parameter.name not in TEXTS:
        return _expanded(parameter, value)
    return value


def _integer(value: str) -> str:
    """Return an integer that may be written as 1e3, 10k or 20B in digits; anything else as it is."""
    from orchestrator import _native

    try:
        return str(_native.parse_count(value))
    except ValueError:
        return value


def _expanded(parameter: Any, value: str) -> str:
    """Return a path with the home folder in place of `~`, which the shell leaves as it is in `--input=~/text`."""
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise CommandError(f"{_name(parameter)} {value}: {error}") from error


def _check_integers(command: Any, ctx: Any) -> None:
    for parameter in command.get_params(ctx):
        value = ctx.params.get(parameter.name)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, int) and abs(number) > MAX_INTEGER:
                raise CommandError(f"{_name(parameter)} {number} is too large: at most {MAX_INTEGER} is possible")


def _name(parameter: Any) -> str:
    """Return an option's longest name, or an argument's."""
    names = [name for name in parameter.opts if name.startswith("-")]
    return max(names, key=len) if names else str(parameter.name).upper()
