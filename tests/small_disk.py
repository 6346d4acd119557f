"""A disk of some hundred kB: a tmpfs that only the programs started in its mount namespace see.

Root mounts it in a namespace of its own; everybody else as the root of a user namespace, where the system allows that.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PRIVATE = ("unshare", "--mount")
OF_A_USER = ("unshare", "--user", "--map-root-user", "--mount")
MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && echo mounted && exec cat'
"""What holds the namespace: `cat` lives until its stdin is closed."""
REFUSED = "this system lets nobody mount a small disk, which this test fills up: `unshare --user --mount` failed: "


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs mounted at `folder` in the namespace of `holder`."""

    folder: Path
    holder: subprocess.Popen[str]
    is_of_a_user: bool

    @property
    def seen(self) -> Path:
        """Its folder as programs outside of the namespace see it."""
        return Path(f"/proc/{self.holder.pid}/root{self.folder}")

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs a command inside, in its folder."""
        user = ("--user", "--preserve-credentials") if self.is_of_a_user else ()
        enter = ["nsenter", f"--target={self.holder.pid}", *user, "--mount"]
        return [*enter, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", *map(str, (self.folder, *words))]

    def resize(self, limits: str) -> None:
        """Give it other limits."""
        subprocess.run(self.command("mount", "-o", f"remount,{limits}", self.folder), check=True)

    def fill(self) -> None:
        """Write a file that takes all the room that is left."""
        with (self.seen / "ballast").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error
                    return


@contextmanager
def small_disk(folder: Path, limits: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs with some limits at a folder. Skips the test where the system refuses, whatever is installed."""
    ways: Sequence[tuple[str, ...]] = (PRIVATE, OF_A_USER) if os.geteuid() == 0 else (OF_A_USER,)
    refusal = "it is not installed"
    for way in ways if shutil.which("unshare") else ():
        words = [*way, "sh", "-c", MOUNT, "sh", limits, str(folder)]
        with subprocess.Popen(
            words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as holder:
            assert holder.stdout and holder.stderr
            if holder.stdout.readline():
                yield SmallDisk(folder, holder, way == OF_A_USER)
                return
            refusal = holder.stderr.read().strip()
    pytest.skip(REFUSED + refusal)
