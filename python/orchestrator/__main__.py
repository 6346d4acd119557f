"""The entry point of `orchestrate` and of `python -m orchestrator`.

The package handles Ctrl-C from its first lines on; Python's own start, before them, is Python's.
"""

from __future__ import annotations

import signal
import sys

from orchestrator import exit_at_once


def main() -> None:
    """Run the command; Ctrl-C during its imports ends it with one sentence, and after its end it is ignored."""
    is_default = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, exit_at_once)
    if is_default:
        signal.signal(signal.SIGINT, exit_at_once)
    try:
        from orchestrator import cli
    except ImportError as error:
        sys.exit(f"orchestrate: the package is not complete: {error}. Install it again: `make build`, or pip")

    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:
        exit_at_once()
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
