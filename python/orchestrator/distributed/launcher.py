"""Starts the ranks of a run on this machine as torchrun does, and ends with the exit code of the trainer.

torchrun ends with 1 for whatever a rank ends with, and with a traceback of its own. Its functions do not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.distributed import handle_signals_of_imports, rank_info
from orchestrator.signals import SAVE_REQUESTS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# A checkpoint is written at least this fast: a spinning disk behind a network.
BYTES_PER_SECOND = 50e6
SHUTDOWN_SECONDS = 60
"""Time for a step and for small files when a run is stopped, beside that for writing a checkpoint."""


def main() -> None:
    """Run `python -m orchestrator.distributed.launcher N WORDS...`."""
    handle_signals_of_imports()
    from orchestrator import _native, terminal

    terminal.take_over()
    if not _native.stop_with_launcher():
        sys.exit(ExitCode.TERMINATED)
    try:
        rank_info.timeout()
    except CommandError as failure:
        terminal.complain(f"orchestrate: {failure}")
        sys.exit(failure.code)
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))


def run(ranks: int, words: list[str]) -> int:
    """Train in this many processes, and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, and say so
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks print what is wrong.
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    for number in (*SAVE_REQUESTS, signal.SIGXCPU):
        signal.signal(number, _forward)
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--shutdown-timeout={shutdown_seconds(words)}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "orchestrator.distributed", *words]))
    except SignalException as error:
        return ExitCode.TERMINATED if error.sigval == signal.SIGHUP else 128 + int(error.sigval)
    except ChildFailedError as failed:
        return _explain(failed)
    return 0


def _forward(number: int, _frame: FrameType | None) -> None:
    """Send the ranks, which are the children of this process, a signal that torchrun does not forward."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), number)


def _explain(failed: ChildFailedError) -> int:
    """Return the exit code of the rank that failed first. One that a signal ended could not say so itself."""
    from orchestrator import terminal

    rank, first = failed.get_first_failure()
    codes = [failure.exitcode for failure in failed.failures.values() if failure.exitcode > 0]
    if not codes:
        how = signal.Signals(-first.exitcode).name
        terminal.complain(f"orchestrate: rank {rank}: process {first.pid} was ended by {how}")
    return codes[0] if codes else 1


def shutdown_seconds(words: list[str]) -> int:
    """Return how long the ranks may take to save when they are stopped."""
    from orchestrator import _native

    config = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    try:
        plan = _native.memory_plan(_native.RunConfig.load_for_planning(config[0]))
    except (IndexError, _native.TrainerError):
        return SHUTDOWN_SECONDS  # the ranks report the error
    return SHUTDOWN_SECONDS + int(plan.bytes / BYTES_PER_SECOND)


if __name__ == "__main__":
    main()
