"""Starts the ranks of a run on this machine as torchrun does, and ends with the exit code of the trainer.

torchrun ends with 1 for whatever a rank ends with, and with a traceback of its own. Its functions do not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from orchestrator.distributed import exit_at_once_on_ctrl_c

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# A checkpoint is written at least this fast: a spinning disk behind a network.
BYTES_PER_SECOND = 50e6
SHUTDOWN_SECONDS = 60
"""Time for a step and for small files when a run is stopped, beside that for writing a checkpoint."""


def main() -> None:
    """Run `python -m orchestrator.distributed.launcher N WORDS...`."""
    exit_at_once_on_ctrl_c()
    from orchestrator import terminal

    terminal.take_over()
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))


def run(ranks: int, words: list[str]) -> int:
    """Train in this many processes, and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, and say so
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks print what is wrong.
    logging.getLogger("torch").setLevel(logging.CRITICAL + 1)
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--shutdown-timeout={shutdown_seconds(words)}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "orchestrator.distributed", *words]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        return _explain(failed)
    return 0


def _explain(failed: ChildFailedError) -> int:
    """Return the exit code of the rank that failed first. One that a signal ended could not say so itself."""
    from orchestrator import terminal

    rank, first = failed.get_first_failure()
    told = [failure.exitcode for failure in failed.failures.values() if failure.exitcode > 0]
    if not told:
        how = signal.Signals(-first.exitcode).name
        terminal.complain(f"orchestrate: rank {rank}: process {first.pid} was ended by {how}")
    return told[0] if told else 1


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
