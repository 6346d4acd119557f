"""The help of a command: arguments and options panel by panel, the rare ones with `--help-all` only."""

from __future__ import annotations

import inspect
from typing import Any

HELP_ALL = "--help-all"
OPTIONS = "Options"
WIDTH = 100
"""Columns at most: longer lines are hard to read."""
DATA = "Data"
TOKENIZER = "Tokenizer"
MODEL = "Model"
TRAINING = "Training"
OFTEN = "How often"
RUN = "Run"
PANELS = (DATA, TOKENIZER, MODEL, TRAINING, OFTEN, RUN)
"""The panels of the help text, in their order."""
COMMON = {
    "dataset", "data_config", "split", "max_samples", "input", "validation",
    "vocab_size", "tokenizer_json",
    "model", "init_from", "layers", "hidden_size", "seq_len", "lora_rank",
    "batch_size", "grad_accum", "steps", "epochs", "learning_rate", "schedule", "precision",
    "checkpoint_every", "evaluate_every",
    "experiment", "config", "preset", "depth", "override", "resume", "time_limit", "nproc", "device",
    "version", "help_all", "help",
}  # fmt: skip
"""The options that most people need, of the commands that have `--help-all`."""


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments, options and subcommands of a command as lists that cut no name, whatever the width."""
    parameters = command.get_params(ctx)
    shows_all = ctx.meta.get(HELP_ALL) or all(parameter.name != "help_all" for parameter in parameters)
    panels: dict[str, list[tuple[str, str]]] = {}
    left_out = 0
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        is_argument = parameter.param_type_name == "argument"
        if record is None:
            continue
        if not (shows_all or is_argument or parameter.name in COMMON):
            left_out += 1
            continue
        # `--help` itself comes last, in whichever panel that is.
        last = next(reversed(panels), OPTIONS) if parameter.name == "help" else OPTIONS
        panel = "Arguments" if is_argument else parameter.rich_help_panel or last
        panels.setdefault(panel, []).append(record)
    entries = [(name, _first_paragraph(inner)) for name, inner in getattr(command, "commands", {}).items()]
    for panel, records in [*panels.items(), ("Commands", entries)]:
        if records:
            with formatter.section(panel):
                formatter.write_dl(records)
    if left_out:
        formatter.write_paragraph()
        formatter.write_text(f"{left_out} more options: {ctx.command_path} {HELP_ALL}")


def _first_paragraph(command: Any) -> str:
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
