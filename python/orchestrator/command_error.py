"""The error that ends a command: a message of one short paragraph, and an exit code."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The exit codes of both programs: docs/guide/exit-codes.md lists them, and `error/exit_code.rs` has them."""

    DONE = 0
    UNEXPECTED = 1
    WRONG_REQUEST = 2
    DATA_UNREADABLE = 3
    OUT_OF_MEMORY = 4
    CHECKPOINT_CORRUPTED = 5
    DIVERGED = 6
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """Something the user can put right; the message says what, where and the way out."""

    def __init__(self, message: str, code: int = ExitCode.WRONG_REQUEST) -> None:
        super().__init__(message)
        self.code = code


def reason(error: object) -> str:
    """Return what an error says; one of the system without its number and without the path, which messages name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
