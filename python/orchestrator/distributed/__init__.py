"""Data-parallel training: the trainer in several processes that torchrun starts.

`torchrun --nproc-per-node N -m orchestrator.distributed --config C` trains; `orchestrate --nproc N` starts that.
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from types import FrameType

from orchestrator import extras
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.signals import SAVE_REQUESTS


def require_torch() -> None:
    """Raise a `CommandError` that says what to install if PyTorch is missing."""
    if find_spec("torch") is None:
        raise CommandError(
            "several processes train under torchrun, which comes with PyTorch: " + extras.install_command("distributed")
        )


def handle_signals_of_imports() -> None:
    """Let Ctrl-C end the process without a traceback while PyTorch is imported, and ignore requests to save.

    Processes that this one starts inherit the latter until they train.
    """
    signal.signal(signal.SIGINT, _exit_at_once)
    for number in SAVE_REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(ExitCode.INTERRUPTED)
