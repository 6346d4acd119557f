"""Two machines with one rank each: a network that delays and drops changes no bit, and one that fails is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ranks import TORCHRUN, assert_same_state, checkpoint, copy_of, rows, template, train
from two_machines import Link, NotPermittedError, address, device, on, two_machines
from workspace import Workspace

__all__ = ["template"]
STEPS = 200
LENGTH = (
    f"--override=scheduler.total_steps={STEPS}",
    "--override=runtime.evaluation.every_n_steps=null",
    "--override=runtime.checkpoint.every_n_steps=10",
)
RANK_TIMEOUT = 10


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        with two_machines(delay=0.005, loss=0.005, seed=1) as link:
            yield link
    except NotPermittedError as reason:
        pytest.skip(f"needs network namespaces: {reason}")


class Machine:
    """A torchrun of one rank, whose lines are awaited while the other's are read too."""

    def __init__(self, workspace: Workspace, name: str, config: Path) -> None:
        self.marker = f"GLOO_SOCKET_IFNAME={device(name)}"
        workspace.extra_environment = {
            "GLOO_SOCKET_IFNAME": device(name),
            "ORCHESTRATE_RANK_TIMEOUT": str(RANK_TIMEOUT),
        }
        torchrun = [word for word in TORCHRUN if word != "--standalone"]
        options = (
            "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run",
            f"--rdzv-endpoint={address('a')}:29400", f"--rdzv-conf=is_host={int(name == 'a')}",
            f"--local-addr={address(name)}",
        )  # fmt: skip
        words = ("-m", "orchestrator.distributed", "--config", config, *LENGTH)
        self.process = workspace.start(*on(name), *torchrun, *options, *words)
        self.text = ""
        self._grown = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()
        workspace.extra_environment = {}

    def rank(self) -> int:
        """Return the id of the process that trains."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if self.marker.encode() in variables and any(word.startswith(b"RANK=") for word in variables):
                return int(folder.name)
        raise AssertionError("the rank is not running")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._grown:
                self.text += line
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def until(self, pattern: str, after: int = 0) -> None:
        """Wait until torchrun has printed a line that matches, after the first `after` characters."""
        regex = re.compile(pattern, re.M)
        with self._grown:
            self._grown.wait_for(lambda: self._ended or regex.search(self.text, after), timeout=180)
            assert regex.search(self.text, after), self.text

    def finish(self) -> int:
        code = self.process.wait(timeout=300)
        self._reader.join()
        return code


def test_a_network_that_delays_drops_and_fails_loses_nothing(workspace: Workspace, template: Path, link: Link) -> None:
    config, straight = copy_of(template, "apart"), copy_of(template, "straight")
    machines = [Machine(workspace, name, config) for name in ("a", "b")]
    a, b = machines
    try:
        a.until("^step 12/")
        os.kill(b.rank(), signal.SIGKILL)
        a.until(r"^orchestrate: rank 1 on machine-b: it cannot be reached any more")
        a.until("^step ", len(a.text))
        link.is_cut = True
        a.until(rf"^orchestrate: rank 1 on machine-b: process \d+ has not answered for {RANK_TIMEOUT} seconds")
        b.until(r"^orchestrate: rank 1 on machine-b: the store of torchrun at \S+ has not answered")
        link.is_cut = False
        codes = [machine.finish() for machine in machines]
    finally:
        for machine in machines:
            machine.process.kill()
            machine.finish()
    output = a.text + b.text
    assert codes == [0, 0], output
    assert output.count("orchestrate: ") == 3, output
    assert output.count("resuming at step") == 2, output
    assert link.dropped > 20
    train(workspace, straight, 2, *LENGTH).succeeded()
    assert [row["loss"] for row in rows(config)] == [row["loss"] for row in rows(straight)]
    assert_same_state(checkpoint(config, STEPS), checkpoint(straight, STEPS))
