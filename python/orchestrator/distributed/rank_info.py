"""The rank of this process among those that torchrun has started."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import dataclass

from orchestrator.command_error import CommandError

TIMEOUT_VARIABLE = "ORCHESTRATE_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 60
SHORTEST_TIMEOUT = 5.0
"""The smallest timeout allowed, in seconds: a process of an overloaded machine may not run for some."""


@dataclass(frozen=True)
class RankInfo:
    """A process's place among the ranks, from the environment variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int
    """How often torchrun has started the ranks again."""
    address: str
    port: int
    store_is_served: bool
    """Whether torchrun itself serves the store at this address."""
    host: str
    timeout: float
    """Seconds after which a rank that shows no sign of life counts as hung."""

    @staticmethod
    def from_environment() -> RankInfo:
        """Read the variables that torchrun sets, or raise a `CommandError` if one is missing or wrong."""
        variables, seconds = os.environ, timeout()
        try:
            return RankInfo(
                rank=int(variables["RANK"]),
                world_size=int(variables["WORLD_SIZE"]),
                local_rank=int(variables["LOCAL_RANK"]),
                local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
                restarts=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
                address=variables["MASTER_ADDR"],
                port=int(variables["MASTER_PORT"]),
                store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                host=socket.gethostname(),
                timeout=seconds,
            )
        except (KeyError, ValueError) as error:
            raise CommandError(
                f"this is one process of several, and the environment does not say which ({error}): start them with "
                "`torchrun --nproc-per-node N -m orchestrator.distributed --config FILE` or "
                "`orchestrate train --nproc N --config FILE`"
            ) from error

    def threads(self) -> int:
        """Return this process's share of the cores that it may run on."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return max(1, cores // self.local_world_size)


def timeout() -> float:
    """Return the seconds that `TIMEOUT_VARIABLE` asks for, or raise a `CommandError`."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_TIMEOUT <= seconds < math.inf:
        raise CommandError(
            f"{TIMEOUT_VARIABLE} is {text!r}: give the seconds after which a rank that shows no sign of life counts as "
            f"hung, at least {SHORTEST_TIMEOUT:g}"
        )
    return seconds
