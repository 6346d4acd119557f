"""Starts two ranks with torchrun's agent, forked from a process that has imported PyTorch: a restart takes no import.

`forked_ranks.py RESTARTS WORDS...`. Every rank first prints `rank R is process P`.
"""

from __future__ import annotations

import os
import sys

from orchestrator.distributed import __main__, exchange
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

assert exchange  # imported before the fork


def train(words: list[str]) -> None:
    # In one write: without a buffer `print` makes two, and the lines of two ranks get into each other.
    os.write(sys.stdout.fileno(), f"rank {os.environ['RANK']} is process {os.getpid()}\n".encode())
    sys.argv[1:] = words
    __main__.main()


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="forked", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=int(sys.argv[1]), start_method="fork",
    )  # fmt: skip
    elastic_launch(config, train)(sys.argv[2:])
