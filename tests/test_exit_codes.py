"""One table of exit codes: the guide's, the trainer's and the orchestrator's."""

from __future__ import annotations

import re

from orchestrator import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    OutOfMemoryError,
    TrainerError,
)
from orchestrator.command_error import ExitCode
from workspace import REPOSITORY

EXIT_CODE_RS = REPOSITORY / "transformer_candle" / "training" / "src" / "error" / "exit_code.rs"


def test_guide_rust_and_python_have_the_same_exit_codes() -> None:
    (body,) = re.findall(r"pub enum ExitCode \{(.*?)\n\}", EXIT_CODE_RS.read_text(encoding="utf-8"), re.DOTALL)
    variants = re.findall(r"^    (\w+) = (\d+),$", body, re.MULTILINE)
    of_rust = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(code) for name, code in variants}
    assert of_rust == {code.name: int(code) for code in ExitCode}

    guide = (REPOSITORY / "docs" / "guide" / "exit-codes.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| code \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", guide)
    guide_codes = [
        int(code) for codes in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in codes.split(", ")
    ]
    assert guide_codes == [int(code) for code in ExitCode]


def test_exceptions_carry_the_exit_codes() -> None:
    codes = {
        TrainerError: ExitCode.UNEXPECTED,
        ConfigError: ExitCode.WRONG_REQUEST,
        DataError: ExitCode.DATA_UNREADABLE,
        OutOfMemoryError: ExitCode.OUT_OF_MEMORY,
        CheckpointError: ExitCode.CHECKPOINT_CORRUPTED,
        DivergenceError: ExitCode.DIVERGED,
    }
    assert {exception: exception.exit_code for exception in codes} == codes
