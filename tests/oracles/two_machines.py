"""Two machines on one: network namespaces, and between them a link that delays, drops and can be cut.

Each has a TAP device; what is sent into one is read here and written to the other, or is not. Namespaces of processes
and host names make them see no more of each other than two machines do.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MTU = 9000
MACHINES = ("a", "b")


class NotPermittedError(Exception):
    """This machine does not let us make network namespaces."""


@dataclass
class Link:
    """Carries the frames of two TAP devices, each `delay` seconds late, and drops some of them."""

    descriptors: tuple[int, int]
    delay: float
    loss: float
    draw: random.Random
    is_cut: bool = False
    dropped: int = 0
    carried: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)

    def carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._ends.is_set():
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for source in select.select(self.descriptors, [], [], timeout)[0]:
                frame = os.read(source, MTU + 100)
                if self.is_cut or self.draw.random() < self.loss:
                    self.dropped += 1
                    continue
                target = self.descriptors[source == self.descriptors[0]]
                heapq.heappush(waiting, (time.monotonic() + self.delay, next(order), target, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(waiting)
                os.write(target, frame)
                self.carried += 1

    def end(self) -> None:
        self._ends.set()


def address(machine: str) -> str:
    return f"10.77.0.{1 + MACHINES.index(machine)}"


def device(machine: str) -> str:
    return f"tap-{os.getpid()}-{machine}"


def on(machine: str) -> list[str]:
    """Return the words that, before a command, make it run on a machine."""
    rename = f'hostname machine-{machine}; exec "$@"'
    isolated = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return ["nsenter", f"--net=/run/netns/{_namespace(machine)}", *isolated, "sh", "-c", rename, "sh"]


@contextmanager
def two_machines(delay: float, loss: float, seed: int) -> Iterator[Link]:
    """Make the machines a and b and the link between them.

    Raises:
        NotPermittedError: With the reason, on a machine where that is not possible.
    """
    missing_programs = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing_programs:
        raise NotPermittedError(f"{', '.join(missing_programs)} not found: install iproute2 and util-linux")
    with ExitStack() as stack:
        descriptors = [_make(machine, stack) for machine in MACHINES]
        _run(*on("a"), "true")
        link = Link((descriptors[0], descriptors[1]), delay, loss, random.Random(seed))
        thread = threading.Thread(target=link.carry)
        thread.start()
        stack.callback(thread.join)
        stack.callback(link.end)
        yield link


def _namespace(machine: str) -> str:
    return f"ranks-{os.getpid()}-{machine}"


def _make(machine: str, stack: ExitStack) -> int:
    """Make a machine's namespace and device, and return what its frames are read from."""
    name = _namespace(machine)
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    try:
        tap = os.open("/dev/net/tun", os.O_RDWR)
        stack.callback(os.close, tap)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device(machine).encode(), IFF_TAP_WITHOUT_HEADER))
    except OSError as error:
        raise NotPermittedError(f"no TAP device: {error}") from error
    _run("ip", "link", "set", device(machine), "netns", name, "mtu", str(MTU))
    _run("ip", "-n", name, "address", "add", f"{address(machine)}/24", "dev", device(machine))
    for interface in (device(machine), "lo"):
        _run("ip", "-n", name, "link", "set", interface, "up")
    return tap


def _run(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise NotPermittedError(f"{' '.join(command)}: {process.stderr.strip()}")
