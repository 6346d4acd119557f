"""Calls the emulated driver from Python, without a program in between."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import struct
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cuda_emulator.library import FOLDER, Emulator

Address = int
COUNTERS = re.findall(r"X\((\w+)\)", (FOLDER / "emulator.h").read_text().split("struct counters")[0])


class Failed(Exception):
    """A call of the driver that did not answer CUDA_SUCCESS."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} answered {code}")
        self.code = code


class Pinned:
    """Host memory of the driver."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.address = ctypes.c_void_p()
        cuda.call("cuMemHostAlloc", ctypes.byref(self.address), ctypes.c_size_t(size), 0)
        self.bytes = (ctypes.c_char * size).from_address(self.address.value or 0)


class Cuda:
    """An opened GPU with one stream."""

    def __init__(self, libraries: Path) -> None:
        self.driver = ctypes.CDLL(str(libraries / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.blas = ctypes.CDLL(str(libraries / "libcublasLt.so.13"))
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.new_stream()

    def code(self, name: str, *arguments: Any) -> int:
        """Call the driver; return its result code."""
        answer: int = getattr(self.driver, name)(*arguments)
        return answer

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver; raise `Failed` unless it succeeds."""
        if code := self.code(name, *arguments):
            raise Failed(name, code)

    def new_handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call the driver; return the handle that it makes."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def new_stream(self) -> ctypes.c_void_p:
        return self.new_handle("cuStreamCreate", 1)

    def allocate(self, size: int) -> Address:
        return self.new_handle("cuMemAllocAsync", ctypes.c_size_t(size), self.stream).value or 0

    def free(self, address: Address) -> None:
        self.call("cuMemFreeAsync", ctypes.c_uint64(address), self.stream)

    def upload(self, data: bytes) -> Address:
        address = self.allocate(len(data))
        self.write(address, data)
        return address

    def write(self, address: Address, data: bytes) -> None:
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)), self.stream)

    def read(self, address: Address, size: int, stream: ctypes.c_void_p | None = None) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoHAsync_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size), stream or self.stream)
        return data.raw

    def copy(self, target: Address, source: Address, size: int, stream: ctypes.c_void_p) -> None:
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self.call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size), stream)

    def synchronize(self) -> int:
        return self.code("cuStreamSynchronize", self.stream)

    def function(self, ptx: str, entry: str) -> ctypes.c_void_p:
        module = self.new_handle("cuModuleLoadData", ptx.encode())
        return self.new_handle("cuModuleGetFunction", module, entry.encode())

    def launch(
        self, function: ctypes.c_void_p, grid: Sequence[int], threads: int, values: Sequence[Any], shared: int = 0
    ) -> int:
        """Launch a kernel; return the result code. Values are integers for addresses, or ctypes numbers."""
        c_values = [value if isinstance(value, ctypes._SimpleCData) else ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(c_values))(*[ctypes.addressof(value) for value in c_values])
        return self.code("cuLaunchKernel", function, *grid, threads, 1, 1, shared, self.stream, pointers, None)

    def recorded(self, body: Callable[[], None]) -> ctypes.c_void_p:
        """Return an executable CUDA graph, captured from the calls that `body` makes on the stream."""
        self.call("cuStreamBeginCapture_v2", self.stream, 1)
        body()
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        return self.new_handle("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))

    def counters(self) -> dict[str, int]:
        values = (ctypes.c_uint64 * len(COUNTERS)).in_dll(self.driver, "counters")
        return dict(zip(COUNTERS, values, strict=True))


def run(emulator: Emulator, body: Callable[[Cuda], Any]) -> Any:
    """Run `body` in a process of its own, as a context that failed once stays failed; return what it returns."""
    here, there = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_child, args=(emulator, body, there))
    process.start()
    there.close()
    try:
        succeeded, value = here.recv()
    except EOFError:
        process.join()
        raise Failed("the process", process.exitcode or 0) from None
    process.join()
    if not succeeded:
        raise AssertionError(value)
    return value


def _child(emulator: Emulator, body: Callable[[Cuda], Any], answer: Connection) -> None:
    os.environ.update(emulator.environment())
    # A test that expects the driver to abort needs no traceback of it.
    faulthandler.disable()
    try:
        answer.send((True, body(Cuda(emulator.libraries))))
    except BaseException:
        answer.send((False, traceback.format_exc()))


def floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
