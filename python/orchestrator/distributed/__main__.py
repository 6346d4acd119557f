"""One rank of a run: `torchrun --nproc-per-node N -m orchestrator.distributed --config C`.

It takes the options of `orchestrate train`. Where torchrun starts the ranks again (`--max-restarts`), they resume.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.distributed import handle_signals_of_imports
from orchestrator.signals import Terminated

if TYPE_CHECKING:
    from orchestrator.distributed.exchange import ConnectGpus


def main(connect_gpus: ConnectGpus | None = None) -> None:
    """Train as the rank that torchrun says this process is.

    Args:
        connect_gpus: Connects the GPUs of the ranks; None for NCCL.
    """
    handle_signals_of_imports()
    from orchestrator import terminal

    terminal.take_over()
    if {"-h", "--help"} & set(sys.argv[1:]):
        from orchestrator import cli

        if os.environ.get("RANK", "0") == "0":
            sys.argv = ["orchestrate", "train", "--help"]
            cli.main()
        return
    try:
        code = run(sys.argv[1:], connect_gpus)
    except CommandError as failure:
        terminal.complain(f"orchestrate: {failure}")
        code = failure.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads would end a process that has lost a rank with an error


def run(words: list[str], connect_gpus: ConnectGpus | None = None) -> int:
    """Train, and return the exit code. Of several ranks that fail, one says why."""
    from orchestrator import _native, distributed
    from orchestrator.distributed.rank_info import RankInfo
    from orchestrator.launch import stopping_the_trainer

    rank_info = RankInfo.from_environment()
    distributed.require_torch()
    os.environ.setdefault("RAYON_NUM_THREADS", str(rank_info.threads()))
    from orchestrator.distributed import nccl
    from orchestrator.distributed.exchange import TorchExchange

    with stopping_the_trainer() as stopping:
        try:
            exchange = TorchExchange(rank_info, connect_gpus or nccl.connect)
        except (KeyboardInterrupt, Terminated) as interruption:  # torchrun knows why, or the user
            return _explained(interruption)[1]
        if exchange.attempt.resumes and not any(word.startswith("--resume") for word in words):
            words = [*words, "--resume=latest"]
        try:
            exchange.connect()
            code = _native.train_rank(words, exchange)
        except BaseException as error:
            stopping.ignored = True  # torchrun stops all ranks when it sees that one has ended
            failure = exchange.lost or exchange.board.own(*_explained(error))
            exchange.board.tell(failure)
            return failure.code
    exchange.close()
    return code


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the message and exit code of an error."""
    from orchestrator import _native

    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", ExitCode.INTERRUPTED
    if isinstance(error, Terminated):
        return f"stopped by {error.signal}", ExitCode.TERMINATED
    # The trainer keeps only the message of what an exchange raises, and a MemoryError has none.
    if isinstance(error, MemoryError) or (isinstance(error, _native.TrainerError) and not str(error)):
        return "it has run out of memory", ExitCode.OUT_OF_MEMORY
    if isinstance(error, CommandError):
        return str(error), error.code
    if isinstance(error, _native.TrainerError):
        return str(error), error.exit_code
    return f"a bug, please report it: {type(error).__name__}: {error}", 1


if __name__ == "__main__":
    main()
