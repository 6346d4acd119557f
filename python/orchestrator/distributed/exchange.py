"""Moves gradients, weights and messages between ranks with `torch.distributed`, on the trainer's own memory.

Sums are taken here, in an order of our own, so that a number of ranks always gives the same bits: gradients as a binary
tree of neighbouring ranks, which is a part of the tree of `runtime.deterministic_reduction`, the rest in the order of
the ranks. Gradients go point to point in buckets: gloo's reduce_scatter sends twice as much, and all_to_all wants them
side by side in another buffer (docs/decisions/025-ranks.md).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.distributed.attempt import join, remember_training
from orchestrator.distributed.failures import Failure, FailureBoard
from orchestrator.distributed.heartbeat import Heartbeat
from orchestrator.distributed.place import Place

if TYPE_CHECKING:
    from orchestrator._native import Memory

BACKEND = "gloo"
INTERFACES = "GLOO_SOCKET_IFNAME"
"""gloo's variable for the network interfaces that connect the ranks."""
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, which may be saving."""
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc")
"""What PyTorch says when the system gives it no memory."""

Shards = list[tuple[int, int]]


class RankLostError(Exception):
    """Another rank has ended, or this one cannot exchange with it."""


class TorchExchange:
    """Connects the ranks of a run; every rank calls the same methods in the same order.

    Raises:
        RankLostError: By every method, once another rank has ended: `lost` says which and why.
    """

    def __init__(self, place: Place) -> None:
        """Wait for the processes of all ranks.

        Raises:
            CommandError: torchrun's store cannot be reached, or a rank does not come.
        """
        self.rank, self.world_size, self.local_world_size = place.rank, place.world_size, place.local_world_size
        self.lost: Failure | None = None
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._store = _connect(place, may_serve=True)
        self.attempt = join(self._store, place)
        ending = threading.Lock()
        self.board = FailureBoard(self._store, self.attempt, ending)
        self._heartbeat = Heartbeat(_connect(place, may_serve=False), self.attempt, ending)
        self._has_trained = False

    def connect(self) -> None:
        """Connect to all ranks.

        Raises:
            CommandError: This machine has no gloo, or not the network interface that gloo is told to use.
        """
        _require_gloo()
        store = self.attempt.keys_in(self._store)
        with self._reaching_all():
            dist.init_process_group(BACKEND, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT)

    def reduce_gradients(self, gradients: Memory, staging: Memory, shards: Shards) -> None:
        """Add up this rank's shard of the gradients of all ranks."""
        flat, received = _tensor(gradients), _tensor(staging)
        width = received.shape[1]
        with self._reaching_all():
            if not self._has_trained:
                remember_training(self._store)
                self._has_trained = True
            for offset in range(0, max(end - start for start, end in shards), width):
                bucket = [flat[min(start + offset, end) : min(start + offset + width, end)] for start, end in shards]
                own = bucket[self.rank]
                rows = {other: row[: len(own)] for other, row in zip(self._others, received, strict=True)}
                self._swap({other: bucket[other] for other in self._others}, rows)
                _sum([own if rank == self.rank else rows[rank] for rank in range(self.world_size)], own)

    def gather_weights(self, weights: Memory, shards: Shards) -> None:
        """Give every rank the shards of all."""
        flat = _tensor(weights).view(torch.uint8)  # gloo sends no 16-bit integers
        size = flat.nbytes // len(_tensor(weights))
        parts = [flat[start * size : end * size] for start, end in shards]
        with self._reaching_all():
            self._swap(dict.fromkeys(self._others, parts[self.rank]), {other: parts[other] for other in self._others})

    def sum(self, numbers: list[float]) -> list[float]:
        """Add up numbers over all ranks."""
        with self._reaching_all():
            first, *others = self._all(torch.tensor(numbers, dtype=torch.float64))
        for other in others:
            first += other
        return list(first.tolist())

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with self._reaching_all():
            lengths = [int(length) for length in self._all(torch.tensor([len(own)]))]
            padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
            padded[: len(own)] = own
            gathered = self._all(padded)
        rows = zip(gathered, lengths, strict=True)
        return [row[:length].numpy().tobytes().decode() for row, length in rows]

    def close(self) -> None:
        """Leave the others. Without it gloo's threads end the process with an error."""
        self._heartbeat.stop()
        dist.destroy_process_group()

    def _all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks as rows."""
        gathered = torch.empty(self.world_size * len(own), dtype=own.dtype)
        dist.all_gather_into_tensor(gathered, own)
        return gathered.view(self.world_size, len(own))

    def _swap(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Send a tensor to every other rank, and receive one from each; empty ones stay."""
        under_way = [dist.irecv(tensor, rank) for rank, tensor in received.items() if len(tensor)]
        under_way += [dist.isend(tensor, rank) for rank, tensor in sent.items() if len(tensor)]
        for work in under_way:
            if work is not None:
                work.wait()

    @contextmanager
    def _reaching_all(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            cause = str(error).partition("\n")[0].rpartition("] ")[2] or type(error).__name__
            if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
                self.lost = self.board.own(f"it has run out of memory ({cause})", ExitCode.OUT_OF_MEMORY)
            else:
                self.lost = self.board.who_ended(cause, self._heartbeat.silent)
            raise RankLostError(str(self.lost)) from error


def _require_gloo() -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        raise CommandError(
            f"this PyTorch ({torch.__version__}) has no gloo, which connects processes on CPUs: install its wheel from "
            "PyPI"
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    for asked in os.environ.get(INTERFACES, "").split(","):
        if asked and asked not in interfaces:
            raise CommandError(
                f"{INTERFACES} asks for the network interface {asked}, and there are {', '.join(interfaces)}"
            )


def _connect(place: Place, may_serve: bool) -> dist.Store:
    """Connect to torchrun's store, or serve one where torchrun does not."""
    is_server = may_serve and place.rank == 0 and not place.store_is_served
    try:
        return dist.TCPStore(place.address, place.port, is_master=is_server, timeout=timedelta(minutes=5))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise CommandError(
            f"cannot {'open' if is_server else 'reach'} port {place.port} of {place.address}, where the ranks meet: "
            f"{cause}. Give torchrun another --master-port, or --standalone on one machine"
        ) from error


def _tensor(memory: Memory) -> torch.Tensor:
    return torch.from_numpy(np.asarray(memory))


def _sum(parts: list[torch.Tensor], into: torch.Tensor) -> None:
    """Add up the parts as a binary tree of neighbours, which overwrites them, and leave the sum in `into`."""
    while len(parts) > 1:
        pairs = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    if parts[0] is not into:
        into.copy_(parts[0])
