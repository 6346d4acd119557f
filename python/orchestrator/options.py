"""Typer's options, made from where they are declared: a config key's in the schema, a command's by the trainer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, get_type_hints

from typer import Argument, Exit, Option, Typer

from orchestrator import _native, terminal
from orchestrator.arguments import Command

# The placeholder of a value in a help text, by the schema's format or type.
METAVARS = {
    "batch-size": "[N|auto]",
    "num-workers": "[N|auto]",
    "device": "[auto|cpu|cuda|cuda:N]",
    "integer": "N",
    "number": "X",
    "string": "TEXT",
}
TYPES = {"integer": int, "number": float, "boolean": bool}


@dataclass(frozen=True)
class ConfigFlag:
    """A flag that sets a config key: its type, range and help are the schema's; left out, the config decides."""

    name: str
    key: str
    panel: str | None

    @property
    def flag(self) -> str:
        """The flag as it is typed, such as `--text-column`."""
        return f"--{self.name.replace('_', '-')}"

    def parameter(self) -> Parameter:
        """Return the option as a function's parameter."""
        schema = schema_of(self.key)
        kind, metavar = _type_of(schema)
        is_number = kind in (int, float)
        option = Option(
            metavar=metavar,
            # Typer knows no open bounds; a value on one is refused with the rest of the config.
            min=schema.get("minimum") if is_number else None,
            max=schema.get("maximum") if is_number else None,
            help=_first_sentence(schema["description"]),
            rich_help_panel=self.panel,
        )
        return parameter(self.name, Annotated[kind | None, option])


@dataclass(frozen=True)
class TrainerCommand:
    """A command of the trainer's program, whose options `orchestrate` shows and whose values it forwards."""

    name: str
    about: str
    options: list[dict[str, Any]]

    def parameters(self, names: Iterable[str] = (), panel: str | None = None) -> list[Parameter]:
        """Return its options as a function's parameters: those of these names, else all."""
        return [_parameter_of(option, panel) for option in self.options if not names or option["name"] in names]

    def words(self, values_by_name: dict[str, Any]) -> list[str]:
        """Return the command line for the values of its options."""
        words, arguments = [self.name], []
        for option in self.options:
            value = values_by_name.get(option["name"])
            values = value if isinstance(value, list) else [] if value in (None, False) else [value]
            if not option["flags"]:
                arguments += values
            elif option["value"] is None:
                words += option["flags"][:1] * len(values)
            else:
                words += [f"{option['flags'][0]}={value}" for value in values]
        return [*words, "--", *arguments] if arguments else words


@cache
def trainer_command(name: str) -> TrainerCommand:
    """Return a command of the trainer's program."""
    (declaration,) = (command for command in _native.declared_commands() if command["name"] == name)
    return TrainerCommand(**declaration)


def run_in_the_trainer(words: list[str]) -> int:
    """Run a command of the trainer in this process and return its exit code."""
    return _native.run_command(words, terminal.write, sys.stdout.isatty())


def add_trainer_command(app: Typer, name: str) -> None:
    """Add a command of the trainer, with the options that the trainer declares."""
    command = trainer_command(name)

    @app.command(name, cls=Command)
    @takes(command.parameters(), command.about)
    def run(**values: Any) -> None:
        raise Exit(run_in_the_trainer(command.words(values)))


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a parameter that Typer reads as an option."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(declaration: type) -> list[Parameter]:
    """Return the fields of a dataclass that are annotated with an option or an argument, as a function's parameters."""
    hints = get_type_hints(declaration, include_extras=True)
    return [
        parameter(part.name, hints[part.name], _default_of(part))
        for part in fields(declaration)
        if hasattr(hints[part.name], "__metadata__")
    ]


def _default_of(part: Field[Any]) -> Any:
    if part.default_factory is not MISSING:
        return part.default_factory()
    return Parameter.empty if part.default is MISSING else part.default


def panel_option(panel: str, help: str, *names: str, **details: Any) -> Any:
    """Return an option of a panel of the help text."""
    return Option(*names, help=help, rich_help_panel=panel, **details)


def takes(parameters: Iterable[Parameter], about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function of keyword arguments the signature and the text that Typer makes a command of."""

    def with_signature(function: Callable[..., None]) -> Callable[..., None]:
        signature = Signature(list(parameters))
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__annotations__ = {name: part.annotation for name, part in signature.parameters.items()}
        function.__doc__ = about
        return function

    return with_signature


def _parameter_of(option: dict[str, Any], panel: str | None) -> Parameter:
    """Return an option of the trainer. Its values stay text: the trainer checks them."""
    flags = {"metavar": option["value"], "help": option["help"], "rich_help_panel": panel}
    shape: Any = Option(*option["flags"], **flags) if option["flags"] else Argument(**flags)
    if option["value"] is None:
        return parameter(option["name"], Annotated[bool, shape], default=False)
    if option["required"]:
        return parameter(option["name"], Annotated[str, shape], default=Parameter.empty)
    kind: Any = list[str] if option["repeatable"] else str
    return parameter(option["name"], Annotated[kind | None, shape])


_schema = cache(_native.json_schema)


def schema_of(key: str) -> dict[str, Any]:
    """Return the JSON Schema of a dotted config key, or raise a `KeyError`."""
    schema = _schema()
    for name in key.split("."):
        schema = schema["properties"][name]
    return schema


def _type_of(schema: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the type of a key's values, and their placeholder in a help text."""
    choices = tuple(choice["const"] for choice in schema.get("oneOf", ()))
    if choices:
        return Literal[choices], None
    types = schema["type"]
    (first, *others) = [types] if isinstance(types, str) else [name for name in types if name != "null"]
    kind = str if others else TYPES.get(first, str)
    return kind, METAVARS.get(schema.get("format", "")) or METAVARS.get(first)


def _first_sentence(description: str) -> str:
    return re.split(r"(?<=\.)\s", description, maxsplit=1)[0]
