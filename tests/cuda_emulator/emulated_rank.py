"""One rank on an emulated GPU: `orchestrator.distributed` with another connection of GPUs, as NCCL needs real ones.

What NCCL would move from GPU to GPU is copied to the host by the emulated driver, in the order of the trainer's stream,
sent by gloo, and copied to the other GPU. The addresses are those that PyTorch would be given.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
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

    def swap(self, sent: list[tuple[int, Any]], received: list[tuple[int, Any]]) -> None:
        self._call("cuCtxSetCurrent", self._context)
        rows = [(rank, part, torch.empty(self._memory(part)[1], dtype=torch.uint8)) for rank, part in received]
        under_way = [dist.irecv(row, rank) for rank, _, row in rows]
        under_way += [dist.isend(self._read(part), rank) for rank, part in sent]
        for work in under_way:
            assert work is not None
            work.wait()
        for _, part, row in rows:
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
        """Address and bytes of a part, which is used in the order of the stream."""
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
