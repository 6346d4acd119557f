"""The system calls of a command, recorded by strace, and the same command killed before one of them.

strace delivers an injected signal before the call is executed, and counts the calls of a name in each thread by
itself: `when=N` hits the thread that is the first to make N of them. Its option `--seccomp-bpf` would make tracing
cheaper, and ignores injected signals.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

INSTALL = "strace is missing, with which these tests kill programs: install it with `apt-get install strace`"
ALWAYS_CHANGING = frozenset(
    "write pwrite64 writev pwritev pwritev2 sendfile copy_file_range fsync fdatasync sync_file_range ftruncate "
    "truncate fallocate rename renameat renameat2 unlink unlinkat mkdir mkdirat rmdir symlink symlinkat link linkat "
    "flock chmod fchmod fchmodat fchmodat2 utimensat".split()
)
"""Calls that change files or make them durable. `open` and its like do only with some flags."""
OPENING = frozenset("open openat openat2 creat".split())
STANDARD_STREAM = re.compile(r"\(?[012]<")
LINE = re.compile(r"(?P<thread>\d+) +(?:(?P<name>\w+)\((?P<text>.*)|<\.\.\. (?P<resumed>\w+) resumed>(?P<rest>.*))")
UNFINISHED = "<unfinished ...>"
STARTED = re.compile(r"\) = (\d+)$")
RESULT = re.compile(r"\) += [-\w]")
PATHS = re.compile(r'"([^"]*)"|\d<(/[^>]*)>')
DATA = re.compile(r"^(\d+<[^>]*>, ).*")
"""What is written into a file, which is no path."""
OF_A_PROCESS = re.compile(r"(?<=\.tmp-)\d+|(?<=tfevents\.)\d+\.[\w-]+\.\d+\.\d+|(?<=/\.E\.)\w{8}(?=/|$)")
"""Parts of names that differ from process to process."""


@dataclass(frozen=True)
class Call:
    """A system call as strace prints it: the `ordinal`-th of its name in its thread."""

    process: int
    """The thread that the process began with."""
    name: str
    ordinal: int
    text: str

    @property
    def changes_files(self) -> bool:
        """Whether it changed a file, a folder, or what of them is durable."""
        if " = -1 E" in self.text or (self.name.startswith("write") and STANDARD_STREAM.match(self.text)):
            return False
        if self.name in OPENING:
            return self.name == "creat" or "O_CREAT" in self.text or "O_TRUNC" in self.text
        return self.name in ALWAYS_CHANGING

    @property
    def has_returned(self) -> bool:
        """Whether its result is known: it was not killed, and did not end the process."""
        return RESULT.search(self.text) is not None

    @property
    def label(self) -> str:
        """Its name and paths, alike in every process that makes it."""
        paths = PATHS.findall(DATA.sub(r"\1", self.text))
        return " ".join([self.name, *(OF_A_PROCESS.sub("*", one or other) for one, other in paths)])


def require_strace() -> None:
    """Fail in CI, and skip the test elsewhere, where strace is not installed."""
    if shutil.which("strace") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(INSTALL)


def record(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path) -> list[Call]:
    """Run a command to its end; return all its system calls in order."""
    process = _traced(command, folder, environment, log, "-y")
    assert process.returncode == 0, f"exit code {process.returncode}\n{process.stdout[-3000:]}"
    return list(calls(log))


def kill_before(
    call: Call, command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path
) -> Call | None:
    """Run a command and kill it before a call; return the call that it was killed before, None if it ended by itself.

    Where threads take turns differently than when the call was recorded, it may be another one of the same name, or
    one of a process that the command has started, which then ends as it does for such a child.
    """
    injection = f"inject={call.name}:signal=KILL:when={call.ordinal}"
    process = _traced(command, folder, environment, log, "-y", "-e", f"trace={call.name}", "-e", injection)
    killed_calls = [made for made in calls(log) if made.ordinal == call.ordinal and not made.has_returned]
    if process.returncode != -signal.SIGKILL:
        assert killed_calls or process.returncode == 0, f"exit code {process.returncode}\n{process.stdout[-3000:]}"
        return None
    assert killed_calls, f"no call was interrupted:\n{log.read_text(errors='replace')[-2000:]}"
    return killed_calls[0]


def reachable(recorded: Sequence[Call]) -> list[Call]:
    """Return the calls that `kill_before` hits: of each name and ordinal the first one that any thread makes.

    Those of processes that the command has started are left out, and the call that starts the command itself.
    """
    first: dict[tuple[str, int], Call] = {}
    for call in recorded:
        first.setdefault((call.name, call.ordinal), call)
    own = [call for call in first.values() if call.process == recorded[0].process]
    return [call for call in own if call.name != "execve"]


def calls(log: Path) -> Iterator[Call]:
    """Parse what strace has written, in the order in which the calls began."""
    counts: Counter[tuple[int, str]] = Counter()
    found: list[tuple[int, str, int, list[str]]] = []
    unfinished: dict[int, list[str]] = {}
    for line in log.read_text(errors="replace").splitlines():
        if not (parsed := LINE.match(line)):
            continue
        thread = int(parsed["thread"])
        if parsed["resumed"]:
            if thread in unfinished:
                unfinished.pop(thread).append(parsed["rest"])
            continue
        counts[thread, parsed["name"]] += 1
        parts = [parsed["text"].removesuffix(UNFINISHED)]
        if parsed["text"].endswith(UNFINISHED):
            unfinished[thread] = parts
        found.append((thread, parsed["name"], counts[thread, parsed["name"]], parts))
    processes: dict[int, int] = {}
    for thread, name, ordinal, parts in found:
        call = Call(processes.setdefault(thread, thread), name, ordinal, "".join(parts).strip())
        if "CLONE_THREAD" in call.text and (started := STARTED.search(call.text)):
            processes[int(started[1])] = call.process
        yield call


def trace(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path, *options: str) -> str:
    """Run a command to its end under strace with more options; return what it printed."""
    process = _traced(command, folder, environment, log, *options)
    assert process.returncode == 0, f"exit code {process.returncode}\n{process.stdout[-3000:]}"
    return process.stdout


def _traced(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    strace = ["strace", "-f", "-qq", "-e", "signal=none", *options, "-o", str(log)]
    return subprocess.run(
        [*strace, "--", *map(str, command)], cwd=folder, env=dict(environment), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
