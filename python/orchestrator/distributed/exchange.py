"""Moves gradients, weights and messages between ranks with `torch.distributed`, on the trainer's own memory.

gloo connects the processes: messages, votes, and what lies in the machine's memory. GPUs are connected by `nccl.py`.
Messages are summed here, in the order of the ranks, so that a number of ranks always gives the same bits; the trainer
sums gradients itself. Parts go point to point: gloo's reduce_scatter sends twice as much, and all_to_all wants them
side by side in another buffer (docs/decisions/025-ranks.md).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.distributed import nccl
from orchestrator.distributed.attempt import join, remember_training
from orchestrator.distributed.failures import Failure, FailureBoard
from orchestrator.distributed.heartbeat import Heartbeat
from orchestrator.distributed.rank_info import RankInfo

if TYPE_CHECKING:
    from orchestrator._native import Memory

BACKEND = "gloo"
INTERFACES = "GLOO_SOCKET_IFNAME"
"""gloo's variable for the network interfaces that connect the ranks."""
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, which may be saving."""
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc")
"""Parts of PyTorch's messages when it cannot allocate memory."""


Parcels = list[tuple[int, "Memory"]]
"""Parts of buffers, each with the rank that it is sent to or received from."""


class GpuGroup(Protocol):
    """The connected GPUs of the ranks."""

    def begin_swap(self, sent: Parcels, received: Parcels) -> None:
        """Start sending and receiving parts of buffers once the work queued on the trainer's stream so far is done."""

    def end_swap(self) -> None:
        """Make the trainer's stream wait for the transfers that were started. The host does not wait."""


ConnectGpus = Callable[[int, int, timedelta], GpuGroup | str]
"""The type of `nccl.connect`: GPU, CUDA stream and timeout to the connected GPUs, or to what is missing."""


class RankLostError(Exception):
    """Another rank has ended, or this one cannot exchange with it."""


class TorchExchange:
    """Connects the ranks of a run; every rank calls the same methods in the same order.

    Raises:
        RankLostError: By every method, once another rank has ended: `lost` says which and why.
    """

    def __init__(self, rank_info: RankInfo, connect_gpus: ConnectGpus = nccl.connect) -> None:
        """Wait until the processes of all ranks have started.

        Raises:
            CommandError: torchrun's store cannot be reached, or a rank does not start.
        """
        self.rank, self.world_size = rank_info.rank, rank_info.world_size
        self.local_rank, self.local_world_size = rank_info.local_rank, rank_info.local_world_size
        self.lost: Failure | None = None
        self._store = _connect(rank_info, may_serve=True)
        self.attempt = join(self._store, rank_info)
        ending = threading.Lock()
        self.board = FailureBoard(self._store, self.attempt, ending)
        self._heartbeat = Heartbeat(_connect(rank_info, may_serve=False), self.attempt, ending)
        self._has_trained = False
        self._connect_gpus = connect_gpus
        self._gpus: GpuGroup | None = None
        self._under_way: list[dist.Work] = []

    def connect(self) -> None:
        """Connect to all ranks.

        Raises:
            CommandError: This machine has no gloo, or not the network interface that gloo is told to use.
        """
        _require_gloo()
        store = self.attempt.keys_in(self._store)
        with self._reaching_all():
            dist.init_process_group(BACKEND, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT)

    def connect_gpus(self, gpu: int, stream: int) -> str | None:
        """Connect this rank's GPU, whose buffers are used in the order of a CUDA stream, to those of the other ranks.

        Returns:
            What is missing for that, as a sentence; None if nothing is.
        """
        if self.world_size == 1:
            return None
        with self._reaching_all():
            connected = self._connect_gpus(gpu, stream, TIMEOUT)
        if isinstance(connected, str):
            return connected
        self._gpus = connected
        return None

    def begin_swap(self, sent: Parcels, received: Parcels) -> None:
        """Begin to send parts of buffers to other ranks, and to receive others from them."""
        with self._reaching_all():
            if not self._has_trained:
                remember_training(self._store)
                self._has_trained = True
            if self._gpus is not None:
                self._gpus.begin_swap(sent, received)
                return
            under_way = [dist.irecv(_bytes(part), rank) for rank, part in received]
            under_way += [dist.isend(_bytes(part), rank) for rank, part in sent]
            self._under_way = [work for work in under_way if work is not None]

    def end_swap(self) -> None:
        """Wait for the transfers that were started; on GPUs the trainer's stream waits, not the host."""
        with self._reaching_all():
            if self._gpus is not None:
                self._gpus.end_swap()
                return
            under_way, self._under_way = self._under_way, []
            for work in under_way:
                work.wait()

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
        """Disconnect from the other ranks. Without it gloo's threads end the process with an error."""
        self._heartbeat.stop()
        self._gpus = None
        dist.destroy_process_group()

    def _all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks as rows."""
        gathered = torch.empty(self.world_size * len(own), dtype=own.dtype)
        dist.all_gather_into_tensor(gathered, own)
        return gathered.view(self.world_size, len(own))

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
    for name in os.environ.get(INTERFACES, "").split(","):
        if name and name not in interfaces:
            raise CommandError(
                f"{INTERFACES} asks for the network interface {name}, and there are {', '.join(interfaces)}"
            )


def _connect(rank_info: RankInfo, may_serve: bool) -> dist.Store:
    """Connect to torchrun's store, or serve one where torchrun does not."""
    is_server = may_serve and rank_info.rank == 0 and not rank_info.store_is_served
    try:
        return dist.TCPStore(rank_info.address, rank_info.port, is_master=is_server, timeout=timedelta(minutes=5))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise CommandError(
            f"cannot {'open' if is_server else 'reach'} port {rank_info.port} of {rank_info.address}, where the ranks "
            f"meet: {cause}. Give torchrun another --master-port, or --standalone on one machine"
        ) from error


def _bytes(part: Memory) -> torch.Tensor:
    return torch.from_numpy(np.asarray(part)).view(torch.uint8)  # gloo sends no 16-bit integers
