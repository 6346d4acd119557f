"""Starts the trainer: the Rust program in its own process group, or the same loop inside this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from orchestrator import _native, distributed, terminal, trainer_program
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.options import trainer_command
from orchestrator.paths import this_command
from orchestrator.settings import Launch
from orchestrator.signals import SAVE_REQUESTS, STOPPING, Terminated, respected, without_timeout

STARTED = time.time()
"""When this process began its work, in seconds since 1970: a session's time limit counts from then."""


@dataclass(frozen=True)
class Job:
    """A run to train: the options of the trainer's `train`, the lock, and the number of processes."""

    config: Path
    overrides: list[str] = field(default_factory=list)
    resume: str | None = None
    rebatch: bool = False
    accept_changed_data: bool = False
    time_limit: str | None = None
    profile: str | None = None
    lock: _native.RunLock | None = None
    """The run directory's lock, if it is held already: the trainer inherits it."""
    ranks: int | None = None
    """The number of processes under torchrun; None for one process without it."""

    def words(self) -> list[str]:
        """Return the command line after the program's name."""
        return trainer_command("train").words({**vars(self), "override": self.overrides})


def trainer(launch: Launch, target: Path | None) -> Path | None:
    """Return the program that will train; None where this process trains, or the ranks that it starts do.

    Args:
        launch: Whether the Rust program or this process trains.
        target: Cargo's target directory, if one is given.
    """
    program = trainer_program.find(target) if launch in (Launch.AUTO, Launch.PROCESS) else None
    if program is None and launch is Launch.PROCESS:
        raise CommandError(
            f"the trainer program {trainer_program.NAME} is neither in the build folder nor on the PATH: build it with "
            "`cargo build --release`, or use --launch bindings"
        )
    return program


def start(words: list[str], launch: Launch, target: Path | None, lock: _native.RunLock | None = None) -> int:
    """Run the trainer's `train`, and return its exit code.

    Args:
        words: The command line after the program's name.
        launch: Whether the Rust program or this process trains.
        target: Cargo's target directory, if one is given.
        lock: The run directory's lock, if it is held already: the trainer inherits it.
    """
    if program := trainer(launch, target):
        return _in_a_process([str(program), *words], lock)
    with stopping_the_trainer():
        os.environ.update(launcher())
        return _native.run_command(words, terminal.write, sys.stdout.isatty(), lock)


def launcher() -> dict[str, str]:
    """Return the environment variable that names this process to a trainer.

    The trainer counts its time limit from our start, and names us in what it says to type. One that is a child of ours
    also saves and ends when we end without having told it to, as after SIGKILL.
    """
    return {_native.LAUNCHER: f"{os.getpid()}:{STARTED}:{this_command()}"}


def check_ranks(launch: Launch) -> None:
    """Refuse another way to train beside --nproc, and a machine without PyTorch."""
    if launch not in (Launch.AUTO, Launch.NONE):
        raise CommandError("--nproc trains under torchrun: leave out --launch")
    distributed.require_torch()


def start_ranks(words: list[str], ranks: int, lock: _native.RunLock | None = None) -> int:
    """Run the trainer's `train` in several processes of this machine under torchrun, and return its exit code.

    Args:
        words: The command line after the program's name.
        ranks: The number of processes.
        lock: The run directory's lock, if it is held already: the trainers inherit it.
    """
    return _in_a_process([sys.executable, "-m", "orchestrator.distributed.launcher", str(ranks), *words[1:]], lock)


def describe(job: Job, launch: Launch, target: Path | None) -> str:
    """Return the command that will train, or the config and where it will be trained."""
    if job.ranks is not None:
        return f"{job.config} in {job.ranks} processes of torchrun"
    program = trainer(launch, target)
    return " ".join([str(program), *job.words()]) if program else f"{job.config} in this process"


def _in_a_process(command: list[str], lock: _native.RunLock | None) -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif process.poll() is None:
            process.send_signal(number)

    # The trainer inherits that requests to save are ignored, until it handles them.
    with _handling(forward, STOPPING), _handling(signal.SIG_IGN, SAVE_REQUESTS):
        # A session of its own: the terminal's Ctrl-C reaches only us, and we forward it, so the trainer sees it once.
        # The lock belongs to the open file: as the trainer's standard input it lasts as long as the trainer.
        process = subprocess.Popen(
            command, start_new_session=True, stdin=lock.fileno() if lock else None, env=os.environ | launcher()
        )
        for number in early:
            process.send_signal(number)
        with _handling(forward, SAVE_REQUESTS):
            code = process.wait()
    return code if code >= 0 else 128 - code


@dataclass
class Stopping:
    """How this process responds to the signals that stop a run."""

    ignored: bool = False
    """Whether they are ignored: training has failed, and the process still has to report why."""


@contextmanager
def stopping_the_trainer() -> Iterator[Stopping]:
    """Let signals ask the trainer in this process to save and end; a second Ctrl-C ends it at once."""
    asked_before = False
    stopping = Stopping()

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked_before
        if asked_before and number == signal.SIGINT:
            os._exit(ExitCode.INTERRUPTED)
        asked_before = True
        if stopping.ignored:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    # The trainer listens to requests to save itself.
    with _handling(stop, STOPPING), _handling(signal.SIG_IGN, SAVE_REQUESTS):
        yield stopping


@contextmanager
def _handling(handler: signal._HANDLER, numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Handle these signals while the block lasts. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in respected(numbers)}
    try:
        with without_timeout():
            yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
