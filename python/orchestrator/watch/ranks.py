"""The ranks of a run by its metrics: which one is slow, and by how much."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.input_files import json_object
from orchestrator.watch.metrics_file import Row


@dataclass(frozen=True)
class Ranks:
    """The compute times of a run's ranks over its newest lines."""

    compute_seconds: list[float]
    """Median seconds that each rank computes per step."""
    hosts: list[str]
    """The host name of each rank's machine; empty if they are not known."""

    @property
    def slowest(self) -> int:
        """The rank that computes for the longest time."""
        return max(range(len(self.compute_seconds)), key=self.compute_seconds.__getitem__)

    @property
    def ratio(self) -> float | None:
        """The seconds of the slowest rank over the median of the others."""
        others = [seconds for rank, seconds in enumerate(self.compute_seconds) if rank != self.slowest]
        median = statistics.median(others) if others else 0
        return self.compute_seconds[self.slowest] / median if median > 0 else None

    @property
    def host(self) -> str | None:
        """The host name of the slowest rank's machine."""
        return self.hosts[self.slowest] if len(self.hosts) == len(self.compute_seconds) else None


def of_rows(rows: Iterable[Row], run: Path) -> Ranks | None:
    """Return the ranks of the last of these train rows; None for a run of one process."""
    times = [_seconds(row) for row in rows]
    count = len(times[-1]) if times else 0
    if not count:
        return None
    # Rows of a session with another number of ranks are left out.
    columns = zip(*(seconds for seconds in times if len(seconds) == count), strict=True)
    return Ranks([statistics.median(column) for column in columns], _hosts(run))


def as_json(ranks: Ranks | None) -> dict[str, Any] | None:
    """Return the ranks as one JSON object."""
    if ranks is None:
        return None
    return {
        "count": len(ranks.compute_seconds),
        "compute_seconds": ranks.compute_seconds,
        "slowest": ranks.slowest,
        "slowest_host": ranks.host,
        "slowest_over_median": ranks.ratio,
    }


def _seconds(row: Row) -> list[float]:
    seconds = row.get("rank_compute_seconds")
    if not isinstance(seconds, list):
        return []
    valid = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in seconds)
    return [float(value) for value in seconds] if valid else []


def _hosts(run: Path) -> list[str]:
    """Return the host names of the ranks' machines that the trainer wrote; empty if it wrote none."""
    hosts = json_object(run / "environment.json").get("hosts")
    return [str(host) for host in hosts] if isinstance(hosts, list) else []
