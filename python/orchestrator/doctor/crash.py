"""`orchestrate doctor --crash DIR`: a small run in a folder is killed and resumed again and again.

A kill shows whether renaming, replacing and locking do what runs rely on. What is lost with the power, no program can
find out while the power is on: for that the disk's answers to `fsync` must be true.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.command_error import CommandError
from orchestrator.doctor import file_system
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import shown
from orchestrator.screen import counted, duration
from orchestrator.temporary_folder import removed

STEPS = 120
CONFIG = f"""
model: {{hidden_size: 32, intermediate_size: 64, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}}
data: {{train_shards: [text.txt], sequence_length: 32, batch_size: 2, gradient_accumulation_steps: 1,
       shuffle_buffer_size: 16}}
optimizer: {{learning_rate: 3.0e-3}}
scheduler: {{strategy: constant, warmup_steps: 2, total_steps: {STEPS}}}
runtime: {{device: cpu, seed: 7, threads: 1, log_every_n_steps: 1, checkpoint: {{every_n_steps: 2, max_keep: 2}},
          evaluation: {{every_n_steps: {STEPS}, max_batches: 1}}}}
"""
PREPARE = ("--preset=smoke_cpu", "--input=text.txt", "--seq-len=32", "--vocab-size=300", "--steps=1", "--launch=none")
WRONG_REQUEST = 2
COMPARED = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")
LONGEST_LIFE = 1.0
"""Seconds after which a trainer is killed at the latest, unless it needs longer to start."""


def examine(folder: Path, trainer: Path, kills: int, tell: Callable[[str], None]) -> list[Finding]:
    """Kill and resume a small run in a folder; say whether the file system can be trusted. Nothing is left behind.

    Args:
        folder: Where the run is made.
        trainer: The trainer's program.
        kills: How often.
        tell: Receives a line of progress now and then.

    Raises:
        CommandError: The folder does not take a file.
    """
    try:
        with removed(folder / f".doctor-{os.getpid()}") as scratch:
            test = CrashTest(scratch, trainer, kills, tell)
            return [file_system.describe(folder), file_system.replacing(scratch), *test.findings()]
    except OSError as error:
        way_out = "name a folder that takes files"
        raise CommandError(f"cannot write below {shown(folder)}: {error.strerror}; {way_out}") from error


class CrashTestError(Exception):
    """What the file system, or the trainer on it, did wrong."""


@dataclass
class CrashTest:
    """Runs in `scratch` that are killed `kills` times in all, at random moments."""

    scratch: Path
    trainer: Path
    kills: int
    tell: Callable[[str], None]
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    killed: int = 0

    def findings(self) -> list[Finding]:
        """Return what the locks and the kills have shown."""
        begin = time.monotonic()
        try:
            self._prepare()
            undisturbed, seconds = self._undisturbed()
            locks = self._locks()
            self._kill_and_resume(undisturbed, max(LONGEST_LIFE, seconds / 8))
        except CrashTestError as failure:
            text = f"{failure}: keep runs on another file system"
            return [Finding("kills", Verdict.BAD, text, {"kills": self.killed})]
        text = (
            f"a run was killed and resumed {counted(self.killed, 'time')} in {duration(time.monotonic() - begin)}, and "
            "ended with the weights, optimizer, data position and ledger of an undisturbed one, bit for bit"
        )
        return [locks, Finding("kills", Verdict.GOOD, text, {"kills": self.killed})]

    def _prepare(self) -> None:
        lines = (f"the {n * 7919 % 1009} hens see the {n * n % 97} owls of {n % 13} towns\n" for n in range(4_000))
        (self.scratch / "text.txt").write_text("".join(lines), encoding="utf-8")
        undisturbed = self.scratch / "undisturbed"
        self._ended([sys.executable, "-m", "orchestrator", *PREPARE, f"--run-dir={undisturbed}"], "preparing a run")
        (undisturbed / "training.yaml").write_text(CONFIG)
        shutil.copytree(undisturbed, self.scratch / "killed")

    def _undisturbed(self) -> tuple[dict[str, bytes], float]:
        begin = time.monotonic()
        self._ended(self._train("undisturbed"), "training")
        return self._results("undisturbed"), time.monotonic() - begin

    def _locks(self) -> Finding:
        """Check that a second trainer is refused while a first one lives."""
        with self._started(self._train("killed")) as first:
            assert first.stdout
            output = ""
            for line in first.stdout:
                output += line
                if line.startswith("step "):
                    break
            else:
                raise CrashTestError(f"training ended by itself: {_last_line(output)}")
            # Stopped, it holds its lock, and does not end meanwhile.
            first.send_signal(signal.SIGSTOP)
            second = self._run(self._train("killed"))
        if second.returncode != WRONG_REQUEST or "in use" not in second.stderr:
            raise CrashTestError(
                "two trainers can write into one run: a lock that one of them holds is given to another"
            )
        if "has no locks" in output:
            text = (
                "there are none: a lease keeps a run to one trainer, which after a crash elsewhere takes half a minute"
            )
            return Finding("locks", Verdict.REMARK, text)
        return Finding("locks", Verdict.GOOD, "a second trainer is refused, and the lock ends with its process")

    def _kill_and_resume(self, undisturbed: dict[str, bytes], longest_life: float) -> None:
        """Kill and resume until the run has ended, and once more from its start if it was not killed often enough."""
        while True:
            while self.killed < self.kills and self._is_killed(self.chance.uniform(0, longest_life)):
                if self.killed % 10 == 0:
                    self.tell(f"{self.killed} of {counted(self.kills, 'kill')}")
            self._no_damage(self._ended(self._train("killed"), "resuming"))
            results = self._results("killed")
            if differing := [name for name in undisturbed if results[name] != undisturbed[name]]:
                raise CrashTestError(
                    f"after {counted(self.killed, 'kill')} {', '.join(differing)} differs from an undisturbed run's"
                )
            if self.killed >= self.kills:
                return
            for name in ("checkpoints", "metrics.jsonl", "ledger.jsonl"):
                _remove(self.scratch / "killed" / name)

    def _is_killed(self, seconds: float) -> bool:
        """Resume the run and kill it after some seconds; False if it ended before."""
        with self._started(self._train("killed")) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            is_killed = process.poll() is None
            process.kill()
            output, _ = process.communicate()
        if not is_killed and process.returncode != 0:
            raise CrashTestError(
                f"after {counted(self.killed, 'kill')} the run cannot be resumed: {_last_line(output)}"
            )
        self._no_damage(output)
        self.killed += is_killed
        return is_killed

    def _no_damage(self, output: str) -> None:
        for line in output.splitlines():
            if "corrupted" in line:
                raise CrashTestError(
                    f"after {counted(self.killed, 'kill')} a checkpoint came back damaged ({line.strip()})"
                )

    def _results(self, name: str) -> dict[str, bytes]:
        run = self.scratch / name
        checkpoint = run / "checkpoints" / f"step-{STEPS:08}"
        return {"ledger.jsonl": (run / "ledger.jsonl").read_bytes()} | {
            name: (checkpoint / name).read_bytes() for name in COMPARED
        }

    def _train(self, name: str) -> list[str | Path]:
        resume = ["--resume"] if (self.scratch / name / "checkpoints").exists() else []
        return [self.trainer, "train", "--config", Path(name, "training.yaml"), *resume]

    def _ended(self, words: Sequence[str | Path], what: str) -> str:
        process = self._run(words)
        if process.returncode != 0:
            raise CrashTestError(f"{what} failed ({_last_line(process.stderr)})")
        return process.stdout

    def _run(self, words: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.scratch, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    @property
    def _environment(self) -> dict[str, str]:
        """The caller's environment, in which everything is written into the scratch folder."""
        roots = ("ORCHESTRATE_RUNS_ROOT", "ORCHESTRATE_TOKENIZER_ROOT", "ORCHESTRATE_CACHE_ROOT")
        return os.environ | {root: str(self.scratch / root.lower()) for root in roots}

    @contextmanager
    def _started(self, words: Sequence[str | Path]) -> Iterator[subprocess.Popen[str]]:
        """Start a program that is killed at the end of the block, if it lives. What it prints goes through a pipe."""
        with subprocess.Popen(
            words, cwd=self.scratch, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
