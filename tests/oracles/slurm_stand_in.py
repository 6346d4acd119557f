"""Stands in for Slurm on one machine: submits a batch script as `sbatch` does, with Slurm's variables and commands.

Only what `examples/slurm.sbatch` uses is here, as Slurm's manual pages describe it. Nodes are
processes of this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A batch script that was submitted, with its options."""

    script: Path
    arguments: list[str]
    options: argparse.Namespace
    folder: Path
    """The folder of the stand-in programs and of the files that they write."""
    number: int

    @staticmethod
    def submit(script: Path, arguments: list[str], folder: Path) -> Job:
        """Read the script's options; those that Slurm does not have end the test."""
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/bash", "sbatch wants an interpreter"
        code = next(line for line, text in enumerate(lines) if text and not text.startswith("#"))
        assert not [line for line in lines[code:] if line.startswith("#SBATCH")], (
            "sbatch stops reading at the first command"
        )
        words = [line.removeprefix("#SBATCH").strip() for line in lines[:code] if line.startswith("#SBATCH")]
        folder.mkdir()
        for name in ("srun", "scontrol", "scancel"):
            stand_in = folder / name
            stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
            stand_in.chmod(0o755)
        return Job(script, arguments, _options().parse_args(words), folder, _number_with_a_free_port())

    def environment(self, path: str, restarts: int) -> dict[str, str]:
        """Return the variables that Slurm sets for the script."""
        return {
            "PATH": f"{self.folder}{os.pathsep}{path}",
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NODELIST": f"node[1-{self.options.nodes}]",
            "SLURM_NNODES": str(self.options.nodes),
            "SLURM_NTASKS": str(self.options.nodes * self.options.ntasks_per_node),
            "SLURM_STAND_IN": str(self.folder),
        } | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})

    def requeued(self) -> list[str]:
        """Return the jobs that were queued again, in order."""
        file = self.folder / "requeued"
        return file.read_text().split() if file.exists() else []


def _options() -> argparse.ArgumentParser:
    def signal_and_seconds(text: str) -> int:
        head, _, seconds = text.partition("@")
        if head != "B:USR1":
            raise argparse.ArgumentTypeError("the script's shell, and USR1")
        return int(seconds)

    parser = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    parser.add_argument("--job-name", required=True)
    for name in ("--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--time", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--open-mode", choices=["append", "truncate"], required=True)
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--signal", type=signal_and_seconds, required=True)
    return parser


def _number_with_a_free_port() -> int:
    for number in range(os.getpid() % 9000 + 1000, 10000):
        with socket.socket() as tried:
            if tried.connect_ex(("localhost", 20000 + number)):
                return number
    raise AssertionError("no port is free")


def _srun(words: list[str]) -> int:
    command = words[next(index for index, word in enumerate(words) if not word.startswith("--")) :]
    environments = [os.environ | {"SLURM_PROCID": str(task)} for task in range(int(os.environ["SLURM_NTASKS"]))]
    tasks = [subprocess.Popen(command, env=environment) for environment in environments]

    Path(os.environ["SLURM_STAND_IN"], "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    return max(abs(task.wait()) for task in tasks)


def _scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("localhost\n" * int(os.environ["SLURM_NNODES"]), end="")
        return 0
    assert words == ["requeue", os.environ["SLURM_JOB_ID"]], words
    with Path(os.environ["SLURM_STAND_IN"], "requeued").open("a") as file:
        file.write(f"{words[1]}\n")
    return 0


def _scancel(words: list[str]) -> int:
    """Signal the tasks of the job, and not its batch script."""
    assert words == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], words
    for task in Path(os.environ["SLURM_STAND_IN"], "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scontrol": _scontrol, "scancel": _scancel}[sys.argv[1]](sys.argv[2:]))
