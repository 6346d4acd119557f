"""Times ways to sum gradients and to spread weights between processes: `torchrun --nproc-per-node N exchange.py`.

Prints the median of 15 rounds in milliseconds, and the bytes that each rank must send at least. Which of them training
uses is decided in docs/decisions/025-ranks.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

BUCKET = 1 << 20
ROUNDS = 15


def ways(elements: int, rank: int, ranks: int) -> dict[str, Callable[[], object]]:
    """Return every way over buffers that are allocated once; each leaves the sum or the weights where ours does."""
    size = elements // ranks
    gradients, weights, gathered = torch.randn(elements), torch.randn(elements), torch.empty(elements)
    shards = [slice(other * size, (other + 1) * size) for other in range(ranks)]
    own, others = shards[rank], [other for other in range(ranks) if other != rank]
    staging = torch.empty(ranks - 1, BUCKET)

    def all_to_all() -> None:
        dist.all_to_all_single(gathered, gradients)
        torch.sum(gathered.view(ranks, size), 0, out=gradients[own])

    def point_to_point() -> None:
        for offset in range(0, size, BUCKET):
            part = slice(offset, min(offset + BUCKET, size))
            length = part.stop - part.start
            work = [dist.irecv(row[:length], other) for row, other in zip(staging, others, strict=True)]
            work += [dist.isend(gradients[shards[other]][part], other) for other in others]
            for each in work:
                each.wait()
            for row in staging:
                gradients[own][part] += row[:length]

    def spread() -> None:
        work = [dist.irecv(weights[shards[other]], other) for other in others]
        work += [dist.isend(weights[own], other) for other in others]
        for each in work:
            each.wait()

    def broadcasts() -> None:
        for each in [dist.broadcast(weights[shards[other]], other, async_op=True) for other in range(ranks)]:
            each.wait()

    return {
        "gradients: all_reduce": lambda: dist.all_reduce(gradients),
        "gradients: reduce_scatter": lambda: dist.reduce_scatter_tensor(gathered[:size], gradients),
        "gradients: all_to_all and a sum": all_to_all,
        "gradients: send, receive and a sum": point_to_point,
        "weights: all_gather": lambda: dist.all_gather_into_tensor(weights, weights[own]),
        "weights: broadcasts": broadcasts,
        "weights: send and receive": spread,
    }


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of a round in which all ranks begin together."""
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = arguments.elements // (64 * ranks) * (64 * ranks)
    sent_bytes = 4 * elements * (ranks - 1) / ranks
    if rank == 0:
        print(f"{ranks} ranks, {elements:,} elements; each sends at least {sent_bytes / 1e6:.1f} MB")
    for name, work in ways(elements, rank, ranks).items():
        took = milliseconds(work)
        if rank == 0:
            print(f"{name:36} {took:8.1f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
