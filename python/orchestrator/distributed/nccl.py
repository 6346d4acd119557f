"""Connects the GPUs of the ranks with NCCL, on the trainer's own memory and in the order of its stream.

NCCL waits for the kernels that the trainer has launched before, those launched afterwards wait for NCCL, and the host
waits for neither. NCCL only moves bytes: the trainer adds up what it has received, in an order of its own, because
NCCL's own sums follow the algorithm that it takes for a topology, a size and a version.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from orchestrator._native import Memory


def connect(gpu: int, stream: int, timeout: timedelta) -> NcclGroup | str:
    """Connect this rank's GPU to those of the other ranks, or return what is missing, as a sentence.

    Args:
        gpu: Its ordinal.
        stream: The address of the trainer's CUDA stream.
        timeout: How long the others may take.
    """
    this = f"this PyTorch ({torch.__version__})"
    if not dist.is_nccl_available():
        return f"{this} has no NCCL, which connects GPUs: install its wheel for CUDA from PyPI, or add --device cpu"
    if torch.cuda.device_count() <= gpu:
        return (
            f"{this} sees {torch.cuda.device_count()} GPUs, and this rank trains on cuda:{gpu}: install its wheel for "
            "this machine's driver (python -c 'import torch; torch.cuda.init()' says what is missing)"
        )
    return NcclGroup(gpu, stream, timeout)


class NcclGroup:
    """The GPUs of all ranks, connected by NCCL."""

    def __init__(self, gpu: int, stream: int, timeout: timedelta) -> None:
        self._device = torch.device("cuda", gpu)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.ExternalStream(stream, device=self._device)
        self._group = dist.new_group(backend="nccl", timeout=timeout, device_id=self._device)
        self._under_way: list[dist.Work] = []
        self._connect_peers()

    def begin_swap(self, sent: list[tuple[int, Memory]], received: list[tuple[int, Memory]]) -> None:
        """Start sending and receiving parts of buffers once the work queued on the trainer's stream so far is done.

        NCCL has a stream of its own, so that work queued on the trainer's stream afterwards runs beside the transfers.
        """
        with torch.cuda.device(self._device):  # the trainer calls from any of its threads
            self._begin(
                [(rank, self._bytes(part)) for rank, part in sent],
                [(rank, self._bytes(part)) for rank, part in received],
            )

    def end_swap(self) -> None:
        """Make the trainer's stream wait for the transfers that were started. The host does not wait."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            under_way, self._under_way = self._under_way, []
            for work in under_way:
                work.wait()

    def _bytes(self, part: Memory) -> torch.Tensor:
        return torch.as_tensor(part, device=self._device).view(torch.uint8)

    def _begin(self, sent: list[tuple[int, torch.Tensor]], received: list[tuple[int, torch.Tensor]]) -> None:
        # As one group: sends and receives that are issued one by one would wait for each other.
        parts = [dist.P2POp(dist.irecv, part, rank, self._group) for rank, part in received]
        parts += [dist.P2POp(dist.isend, part, rank, self._group) for rank, part in sent]
        with torch.cuda.stream(self._stream):
            self._under_way = dist.batch_isend_irecv(parts) if parts else []

    def _connect_peers(self) -> None:
        """Exchange a byte with every rank, so that NCCL allocates its buffers before the trainer asks what is free."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        rows = torch.empty(world_size, 2, dtype=torch.uint8, device=self._device)
        others = [other for other in range(world_size) if other != rank]
        self._begin([(other, rows[other, :1]) for other in others], [(other, rows[other, 1:]) for other in others])
        self.end_swap()
        torch.cuda.synchronize(self._device)
        del rows
        torch.cuda.empty_cache()
