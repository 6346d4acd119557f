"""Moves gradients, weights and messages between ranks with `torch.distributed`, on the trainer's own memory.

gloo connects the processes: messages, votes, and what lies in the machine's memory. GPUs are connected by `nccl.py`.
Messages are summed here, in the order of the ranks, so that a number of ranks always gives the same bits; the trainer
sums gradients itself. Parts go point to point: gloo's reduce_scatter sends twice as much, and all_to_all wants them
side by side in another buffer (docs/decisions/025-ranks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.command_error import CommandError
from orchestrator.distributed import nccl
from orchestrator.distributed.failures import Failure, FailureBoard
from orchestrator.distributed.place import Place

if TYPE_CHECKING:
    from orchestrator._native import Memory

BACKEND = "gloo"
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, which may be saving."""


Parcels = list[tuple[int, "Memory"]]
"""Parts of buffers, and the ranks that they go to or come from."""


class GpuGroup(Protocol):
    """The connected GPUs of the ranks."""

    def swap(self, sent: Parcels, received: Parcels) -> None:
        """Send and receive parts of buffers in the order of the trainer's stream, without waiting for it."""


ConnectGpus = Callable[[int, int, timedelta], GpuGroup | str]
"""As `nccl.connect`."""


class RankLostError(Exception):
    """Another rank has ended."""


class TorchExchange:
    """Connects the ranks of a run; every rank calls the same methods in the same order.

    Raises:
        RankLostError: By every method, once another rank has ended: `lost` says which and why.
    """

    def __init__(self, place: Place, connect_gpus: ConnectGpus = nccl.connect) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise CommandError(
                f"this PyTorch ({torch.__version__}) has no gloo, which connects processes on CPUs: install its wheel "
                "from PyPI"
            )
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.local_world_size = place.local_rank, place.local_world_size
        self.lost: Failure | None = None
        store = _connect(place)
        self.board = FailureBoard(store, place)
        self._store = store
        self._connect_gpus = connect_gpus
        self._gpus: GpuGroup | None = None

    def connect(self) -> None:
        """Wait for all ranks."""
        with self._reaching_all():
            dist.init_process_group(
                BACKEND, store=self._store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
            )

    def connect_gpus(self, gpu: int, stream: int) -> str | None:
        """Connect this rank's GPU, whose buffers are used in the order of a CUDA stream, to those of the other ranks.

        Returns:
            What is missing for that, as a sentence.
        """
        if self.world_size == 1:
            return None
        with self._reaching_all():
            connected = self._connect_gpus(gpu, stream, TIMEOUT)
        if isinstance(connected, str):
            return connected
        self._gpus = connected
        return None

    def swap(self, sent: Parcels, received: Parcels) -> None:
        """Send parts of buffers to other ranks, and receive others from them."""
        with self._reaching_all():
            if self._gpus is not None:
                self._gpus.swap(sent, received)
                return
            under_way = [dist.irecv(_bytes(part), rank) for rank, part in received]
            under_way += [dist.isend(_bytes(part), rank) for rank, part in sent]
            for work in under_way:
                if work is not None:
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
        """Leave the others. Without it gloo's threads end the process with an error."""
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
        except RuntimeError as error:
            cause = str(error).partition("\n")[0].rpartition("] ")[2] or type(error).__name__
            self.lost = self.board.who_ended(cause)
            raise RankLostError(str(self.lost)) from error


def _connect(place: Place) -> dist.Store:
    """Open torchrun's store, under a name that every attempt has for itself."""
    is_server = place.rank == 0 and not place.store_is_served
    try:
        store = dist.TCPStore(place.address, place.port, is_master=is_server, timeout=timedelta(minutes=5))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise CommandError(
            f"cannot {'open' if is_server else 'reach'} port {place.port} of {place.address}, where the ranks meet: "
            f"{cause}. Give torchrun another --master-port, or --standalone on one machine"
        ) from error
    return dist.PrefixStore(f"orchestrator/{place.restarts}", store)


def _bytes(part: Memory) -> torch.Tensor:
    return torch.from_numpy(np.asarray(part)).view(torch.uint8)  # gloo sends no 16-bit integers
