"""The options of the pipeline, made from the fields of `Settings`, `CONFIG_FLAGS` and the trainer's `train`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

from typer import Context, Exit

from orchestrator import _native, terminal
from orchestrator.config_flags import CONFIG_FLAGS
from orchestrator.help_text import HELP_ALL, PANELS, RUN
from orchestrator.options import options_of, panel_option, parameter, takes, trainer_command
from orchestrator.settings import Settings

TRAINER_FLAGS = ("override", "resume", "rebatch", "accept_changed_data", "time_limit", "profile")
"""The options of the trainer's `train` that the pipeline takes as well."""


def _show_all_options(context: Context, is_requested: bool) -> None:
    if is_requested:
        context.meta[HELP_ALL] = True
        terminal.result(context.get_help())
        raise Exit


Version = Annotated[bool, panel_option(RUN, "Print the version.", "--version", "-V")]
HelpAll = Annotated[
    bool,
    panel_option(RUN, "Show every option.", HELP_ALL, is_eager=True, callback=_show_all_options),
]


def takes_settings(command: Callable[[Context, Settings], None]) -> Callable[..., None]:
    """Turn a function of `Settings` into one with a parameter per flag, as Typer wants it."""

    def with_flags(context: Context, version: bool, **flags: Any) -> None:
        if version:
            terminal.result(f"orchestrate {_native.__version__}")
            raise Exit
        command(context, settings_of(flags))

    context = parameter("context", Context, default=Parameter.empty)
    return takes([context, *parameters(), parameter("version", Version, False)], command.__doc__ or "")(with_flags)


def settings_of(flags: dict[str, Any]) -> Settings:
    """Return the settings for the values of `parameters`, or of some of them."""
    own = {name: value for name, value in flags.items() if name != "help_all"}
    keys = {flag.name: own.pop(flag.name, None) for flag in CONFIG_FLAGS}
    return Settings(keys={name: value for name, value in keys.items() if value is not None}, **own)


def parameters() -> list[Parameter]:
    """Return an option per flag, panel by panel."""
    options = options_of(Settings) + trainer_command("train").parameters(TRAINER_FLAGS, RUN)
    options += [flag.parameter() for flag in CONFIG_FLAGS]
    options.append(parameter("help_all", HelpAll, default=False))
    return sorted(options, key=lambda option: PANELS.index(option.annotation.__metadata__[0].rich_help_panel))
