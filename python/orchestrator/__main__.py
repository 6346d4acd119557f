"""The entry point of `orchestrate` and of `python -m orchestrator`.

Nothing heavy is imported before Ctrl-C is handled.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command; Ctrl-C during its imports ends it with one sentence."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from orchestrator import cli
    except ImportError as error:
        sys.exit(f"orchestrate: the package is not complete: {error}. Install it again: `make build`, or pip")

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    except KeyboardInterrupt:
        _exit_at_once()


def _exit_at_once(_number: int = signal.SIGINT, _frame: FrameType | None = None) -> None:
    """Exit without unwinding: an exception in the middle of an import would print a traceback."""
    try:
        os.write(2, b"orchestrate: stopped by Ctrl-C\n")
    finally:
        os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
