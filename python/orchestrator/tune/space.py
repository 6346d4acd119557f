"""The search space: which config keys are searched, in which ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator import _native
from orchestrator.command_error import CommandError, reason
from orchestrator.input_files import read_text
from orchestrator.options import schema_of
from orchestrator.paths import shown

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

SHAPE_KEYS = {"model.hidden_size", "model.intermediate_size", "model.num_attention_heads", "model.num_key_value_heads"}
"""Keys that follow from the others where the number of parameters is fixed."""
LENGTH_KEYS = {"scheduler.total_steps", "scheduler.total_epochs"}
"""Keys that follow from the number of tokens that every trial trains on."""


@dataclass(frozen=True)
class Choice:
    """A list of values to choose from."""

    values: list[Any]

    def distribution(self) -> BaseDistribution:
        """Return the values as Optuna's distribution."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def holds(self, value: Any) -> bool:
        """Whether a value is one of these."""
        return value in self.values

    def bounds(self) -> list[Any]:
        """Return the values to check against the config: all of a list, the ends of a range."""
        return self.values


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool
    step: float | None
    is_integer: bool

    def distribution(self) -> BaseDistribution:
        """Return the values as Optuna's distribution."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.is_integer:
            return IntDistribution(int(self.low), int(self.high), self.log, int(self.step or 1))
        return FloatDistribution(self.low, self.high, self.log, self.step)

    def holds(self, value: Any) -> bool:
        """Whether a value is one of these."""
        return isinstance(value, (int, float)) and self.low <= value <= self.high

    def bounds(self) -> list[Any]:
        """Return the values to check against the config: all of a list, the ends of a range."""
        return [int(self.low), int(self.high)] if self.is_integer else [self.low, self.high]


@dataclass(frozen=True)
class Space:
    """The search space of a study."""

    parameters: dict[str, Choice | Range]
    """The values to search, by config key, such as `optimizer.learning_rate`."""
    fixed_parameters: int | None
    """The number of model parameters that every trial keeps, by its hidden size; None if it may differ."""

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the values of each parameter as Optuna's distribution."""
        return {key: values.distribution() for key, values in self.parameters.items()}

    def point(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the searched keys of a config whose values are in their ranges."""
        here = {key: value_of(values, key) for key in self.parameters}
        return {key: value for key, value in here.items() if self.parameters[key].holds(value)}

    def as_dict(self) -> dict[str, Any]:
        """Return the space as plain values, which identify it in a study."""
        ranges = {key: {"type": type(values).__name__, **vars(values)} for key, values in self.parameters.items()}
        return {"parameters": ranges, "fixed_parameters": self.fixed_parameters}


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Return a config's value of a dotted key."""
    value: Any = values
    for name in key.split("."):
        value = value[name]
    return value


def read(path: Path) -> Space:
    """Return the search space of a YAML file. All problems are reported at once.

    Raises:
        CommandError: The file cannot be read, or a key, a type or a range in it is wrong.
    """
    try:
        document = yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(f"cannot read the search space {shown(path)}: {reason(error)}") from error
    except RecursionError:
        raise CommandError(f"cannot read the search space {shown(path)}: it nests too deeply") from None
    form = "a mapping with `parameters:` (config keys and their values) and, optionally, `fixed_parameters:`"
    if not isinstance(document, dict) or not isinstance(document.get("parameters"), dict):
        raise CommandError(f"the search space {shown(path)} must be {form}")
    problems = [f"{name}: unknown; a search space is {form}" for name in document if name not in Space.__annotations__]
    parameters: dict[str, Choice | Range] = {}
    for key, declaration in document["parameters"].items():
        try:
            parameters[str(key)] = _parameter(str(key), declaration)
        except ValueError as problem:
            problems.append(f"{key}: {problem}")
    fixed = None
    try:
        fixed = count(document.get("fixed_parameters"))
    except ValueError as problem:
        problems.append(f"fixed_parameters: {problem}")
    if fixed is not None:
        problems += [f"{key}: follows from fixed_parameters, leave it out" for key in SHAPE_KEYS & set(parameters)]
    if not document["parameters"]:
        problems.append("parameters: names no config key to search")
    if problems:
        raise CommandError("\n".join([f"the search space {shown(path)} is wrong:", *problems]))
    return Space(parameters, fixed)


def count(value: Any) -> int | None:
    """Return a count that may be written as `20M`."""
    if value is None:
        return None
    try:
        number = _native.parse_count(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"is {value!r}: give a number such as 2000000 or 2M")
    return number


def _parameter(key: str, declaration: Any) -> Choice | Range:
    try:
        schema = schema_of(key)
    except KeyError:
        raise ValueError("is not a config key; docs/guide/configuration.md lists them") from None
    if key in LENGTH_KEYS:
        raise ValueError("follows from --tokens, on which every trial trains; leave it out")
    if "properties" in schema:
        raise ValueError(f"is a section: name one of its keys, such as {key}.{next(iter(schema['properties']))}")
    types = schema.get("type", "string")
    kinds = {types} if isinstance(types, str) else set(types)
    if isinstance(declaration, list):
        return Choice(list(_choices(declaration, kinds)))
    if not isinstance(declaration, dict):
        raise ValueError("must be a list of values, or a range such as {low: 1e-4, high: 1e-2, log: true}")
    if not kinds & {"integer", "number"}:
        raise ValueError("has no range: give a list of values")
    return _range(declaration, is_integer="number" not in kinds)


def _choices(declaration: list[Any], kinds: set[str]) -> Iterator[Any]:
    if not declaration:
        raise ValueError("is an empty list")
    for value in declaration:
        if isinstance(value, (list, dict)):
            raise ValueError(f"the value {value!r} is neither a number nor a string, which is all that is searched")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        # YAML reads 1e-3, which has no dot, as a string.
        yield _number(value) if isinstance(value, str) and "number" in kinds else value


def _range(declaration: dict[str, Any], is_integer: bool) -> Range:
    if unknown := set(declaration) - {"low", "high", "log", "step"}:
        raise ValueError(f"unknown {', '.join(map(str, sorted(unknown)))}; a range has low, high, log and step")
    if missing_keys := {"low", "high"} - set(declaration):
        raise ValueError(f"a range needs {' and '.join(sorted(missing_keys))}")
    low, high = _number(declaration["low"]), _number(declaration["high"])
    step = _number(declaration["step"]) if declaration.get("step") is not None else None
    log = declaration.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"log is {log!r}: it must be true or false")
    if low > high:
        raise ValueError(f"low is {low:g} and high {high:g}: low must be at most high")
    if log and low <= 0:
        raise ValueError(f"low is {low:g}: a range on a log scale must begin above 0")
    if step is not None and (log or step <= 0):
        raise ValueError("step must be above 0, and a range on a log scale has none")
    if is_integer and any(number != int(number) for number in (low, high, step or 1)):
        raise ValueError("low, high and step must be integers, as the key is")
    return Range(low, high, log, step, is_integer)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number
