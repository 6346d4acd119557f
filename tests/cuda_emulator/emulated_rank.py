"""One rank on an emulated GPU: `orchestrator.distributed` with another connection of GPUs, as NCCL needs real ones.

What NCCL would move from GPU to GPU is copied to the host by the emulated driver, in the order of the trainer's stream,
sent by gloo, and copied to the other GPU. The addresses are those that PyTorch would be given.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

# Left to themselves the ranks would choose different algorithms for their GEMMs.
os.environ["CUDA_EMULATOR_TIMING"] = os.environ["RANK"]

import torch
import torch.distributed as dist
from orchestrator.distributed.__main__ import main


class HostGroup:
    """Connects emulated GPUs through the host."""

    def __init__(self, gpu: int, stream: int, _timeout: timedelta) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context, self._stream = ctypes.c_void_p(), stream
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), gpu)
        self._rows: list[tuple[Any, torch.Tensor]] = []
        self._under_way: list[dist.Work | None] = []

    def begin_swap(self, sent: list[tuple[int, Any]], received: list[tuple[int, Any]]) -> None:
        assert not self._under_way, "one swap at a time"
        if "SWAPS" in os.environ:
            with Path(os.environ["SWAPS"]).open("a") as file:
                print(len(sent), len(received), file=file)
        self._call("cuCtxSetCurrent", self._context)
        self._rows = [(part, torch.empty(self._memory(part)[1], dtype=torch.uint8)) for _, part in received]
        pairs = zip(received, self._rows, strict=True)
        self._under_way = [dist.irecv(row, rank) for (rank, _), (_, row) in pairs]
        self._under_way += [dist.isend(self._read(part), rank) for rank, part in sent]

    def end_swap(self) -> None:
        self._call("cuCtxSetCurrent", self._context)
        while self._under_way:
            work = self._under_way.pop()
            assert work is not None
            work.wait()
        for part, row in self._rows:
            address, size = self._memory(part)
            self._call(
                "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), ctypes.c_void_p(row.data_ptr()), *self._of(size)
            )

    def _read(self, part: Any) -> torch.Tensor:
        address, size = self._memory(part)
        row = torch.empty(size, dtype=torch.uint8)
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(row.data_ptr()), ctypes.c_uint64(address), *self._of(size))
        return row

    def _memory(self, part: Any) -> tuple[int, int]:
        """Return address and bytes of a part of a buffer, which is used in the order of the stream."""
        interface = part.__cuda_array_interface__
        assert interface["stream"] == self._stream
        assert not hasattr(part, "__array_interface__")
        (elements,) = interface["shape"]
        return interface["data"][0], elements * int(interface["typestr"][2:])

    def _of(self, size: int) -> tuple[ctypes.c_size_t, ctypes.c_void_p]:
        return ctypes.c_size_t(size), ctypes.c_void_p(self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        assert code == 0, f"{name} answered {code}"


main(HostGroup)
