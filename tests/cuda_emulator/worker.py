"""Runs kernels for the emulated driver: Triton's interpreter on the GPU's memory, mapped here at its addresses.

Started by libcuda.so.1 (worker.c describes the requests) with its socket as file 3 and the GPU's memory as file 4. A
kernel is known by the PTX that was loaded: the manifest says which function with which constants it was compiled from.
A launch that the GPU would not survive ends this process or is answered with an error; either way the context is lost.

    CUDA_EMULATOR_KERNELS   the folder of the Triton sources, with ptx/manifest.json
    CUDA_EMULATOR_BREAK     names a kernel of the manifest whose results come out a little too large
    CUDA_EMULATOR_FAULT     names one whose launch fails, after which the context is lost
    CUDA_EMULATOR_ORDER     "reversed" runs a grid's programs from the last to the first
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import importlib
import itertools
import json
import os
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KERNELS = Path(os.environ["CUDA_EMULATOR_KERNELS"])
sys.path.insert(0, str(KERNELS))

import interpreter as _repairs  # noqa: E402, F401  (chooses Triton's interpreter, so it comes before Triton)
import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

MAP, UNMAP, LEARN, LAUNCH = 1, 2, 3, 4
LAUNCH_FAILED = 719
POINTERS = {
    "*bf16": tl.bfloat16, "*fp32": tl.float32, "*i32": tl.int32, "*u32": tl.uint32, "*i16": tl.int16, "*u8": tl.uint8
}  # fmt: skip
SCALARS = {"i32": ("<i", np.int32, tl.int32), "fp32": ("<f", np.float32, tl.float32)}
# Triton's launcher hands every kernel two scratch buffers, which ours do not use.
SCRATCH_ARGUMENTS = 2
BASE = 0x200000000000
PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 1, 2, 1, 2, 16, 32, 0x4000
BROKEN = os.environ.get("CUDA_EMULATOR_BREAK")
FAULTY = os.environ.get("CUDA_EMULATOR_FAULT")
REVERSED = os.environ.get("CUDA_EMULATOR_ORDER") == "reversed"
builder = interpreter.interpreter_builder


class Refused(Exception):
    """A launch that would be undefined on a GPU."""


@dataclass
class Kernel:
    """A function and everything that was fixed when it was compiled."""

    name: str
    function: Any
    arguments: list[dict[str, Any]]
    constants: dict[str, Any]
    threads: int
    shared_bytes: int

    def run(self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, values: list[bytes]) -> None:
        """Run all programs of the grid, one after the other."""
        if block != (self.threads, 1, 1) or shared_bytes < self.shared_bytes:
            expected = f"{self.threads} threads and {self.shared_bytes} bytes"
            raise Refused(f"compiled for {expected} a program, launched with {block} and {shared_bytes}")
        if len(values) != len(self.arguments) + SCRATCH_ARGUMENTS:
            raise Refused(f"{len(values)} arguments for {len(self.arguments)} and {SCRATCH_ARGUMENTS} scratch buffers")
        arguments_by_name = {
            one["name"]: argument(one, value) for one, value in zip(self.arguments, values, strict=False)
        }
        arguments_by_name |= self.constants
        builder.set_grid_dim(*grid)
        programs = list(itertools.product(*map(range, grid)))
        for at in reversed(programs) if REVERSED else programs:
            builder.set_grid_idx(*at)
            self.function(**arguments_by_name)


def argument(declaration: dict[str, Any], value: bytes) -> Any:
    """Return an argument as the kernel's function takes it, checked against the kernel's declaration."""
    kind = declaration["type"]
    number = struct.unpack("<Q", value)[0] if kind in POINTERS else struct.unpack(SCALARS[kind][0], value[:4])[0]
    if declaration["divisible_by_16"] and number % 16:
        raise Refused(f"`{declaration['name']}` is {number:#x}, which is no multiple of 16")
    if kind in POINTERS:
        pointer = tl.pointer_type(POINTERS[kind])
        return tl.tensor(interpreter.TensorHandle(np.array([number], np.uint64), pointer), pointer)
    _, dtype, scalar = SCALARS[kind]
    return tl.tensor(interpreter.TensorHandle(np.array([number], dtype), scalar), scalar)


class Manifest:
    """Finds kernels by the PTX that a program loaded."""

    def __init__(self, folder: Path) -> None:
        entries = json.loads((folder / "manifest.json").read_text())["kernels"]
        self.by_text = {
            (hashlib.sha256((folder / one["file"]).read_bytes()).digest(), one["entry"]): one for one in entries
        }

    def kernel(self, entry: str, text: bytes) -> Kernel:
        """Return the kernel that a PTX was compiled from."""
        record = self.by_text.get((hashlib.sha256(text).digest(), entry))
        if record is None:
            raise Refused(f"no PTX in {KERNELS}/ptx with the entry {entry} has the bytes that were loaded")
        source = importlib.import_module(Path(record["source"]).stem)
        function = getattr(source, record["function"]).rewrite()
        constants = {name: tl.constexpr(value) for name, value in record["constants"].items()}
        threads = 32 * record["num_warps"]
        return Kernel(record["name"], function, record["arguments"], constants, threads, record["shared_bytes"])


def patch_interpreter() -> None:
    """Do once what the interpreter does before every call, and fill undefined values with ones that show in results."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    # It computes every sum of integers twice, to say nothing when they differ.
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    masked_load = interpreter.InterpreterBuilder.create_masked_load

    def load_with_poison(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        """Load NaN or the largest integer into lanes masked out without a value, which a GPU leaves undefined."""
        if other is None:
            dtype = pointers.get_element_ty()
            bits = np.dtype(interpreter._get_np_dtype(dtype))
            filler = np.nan if bits.kind == "f" else 0x7FFF if dtype == tl.bfloat16 else np.iinfo(bits).max
            other = interpreter.TensorHandle(np.full_like(pointers.data, filler, dtype=bits), dtype)
        return masked_load(self, pointers, mask, other, *rest)

    interpreter.InterpreterBuilder.create_masked_load = load_with_poison


def hasten_types() -> None:
    """Make every shape and type once; the interpreter spends most of its time on making them again."""
    shapes: dict[tuple[int, ...], tuple[Any, int, Any]] = {}

    def shape_of(sizes: Any) -> tuple[Any, int, Any]:
        key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in sizes)
        if key not in shapes:
            numel = tl.core.validate_block_shape(key)
            shapes[key] = tl.core.tuple(key), numel, tl.core.tuple([tl.constexpr(size) for size in key])
        return shapes[key]

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, _ = shape_of(shape)
        self.name = f"<{self.shape.values}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, of: Any) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        _, numel, self.shape = shape_of(of.shape) if of.is_block() else scalar_shape
        self.numel = tl.constexpr(numel)

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        key = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if key not in numpy_types:
            numpy_types[key] = ask_interpreter(scalar)
        return numpy_types[key]

    ask_interpreter, numpy_types = interpreter._get_np_dtype, dict[str, Any]()
    interpreter._get_np_dtype = numpy_type
    scalar_shape = tl.core.tuple([]), 1, tl.core.tuple([])
    tl.core.block_type.__init__ = make_type
    tl.core.tensor.__init__ = make_tensor


def spoil_stores(kernel: Kernel) -> None:
    """Make every number that a kernel writes an eighth too large."""
    masked_store, function = interpreter.InterpreterBuilder.create_masked_store, kernel.function

    def store_wrong(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if value.dtype.scalar == tl.bfloat16:
            wide = (value.data.astype(np.uint32) << 16).view(np.float32) * np.float32(1.125)
            value = interpreter.TensorHandle((wide.view(np.uint32) >> 16).astype(np.uint16), value.dtype)
        elif value.data.dtype.kind == "f":
            value = interpreter.TensorHandle((value.data * 1.125).astype(value.data.dtype), value.dtype)
        return masked_store(self, pointers, value, mask, *rest)

    def wrong(**kwargs: Any) -> None:
        interpreter.InterpreterBuilder.create_masked_store = store_wrong
        try:
            function(**kwargs)
        finally:
            interpreter.InterpreterBuilder.create_masked_store = masked_store

    kernel.function = wrong


class Worker:
    """Answers requests until the program is gone."""

    def __init__(self) -> None:
        self.connection = socket.socket(fileno=3)
        self.reader = self.connection.makefile("rb")
        self.manifest = Manifest(KERNELS / "ptx")
        self.learned: dict[int, tuple[str, bytes]] = {}
        self.kernels: dict[int, Kernel] = {}
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def serve(self) -> None:
        """Handle one request after the other."""
        while head := self.reader.read(8):
            kind, size = struct.unpack("<II", head)
            data = self.reader.read(size)
            if kind == LAUNCH:
                self.launch(data)
            elif kind == LEARN:
                entry, text = data[4:].split(b"\0", 1)
                self.learned[struct.unpack("<I", data[:4])[0]] = entry.decode(), text
            else:
                self.map(*struct.unpack("<QQ", data), mapped=kind == MAP)

    def map(self, address: int, size: int, *, mapped: bool) -> None:
        """Map or unmap the GPU's memory at the addresses that the program knows."""
        flags = MAP_SHARED | MAP_FIXED if mapped else MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        where = (4, address - BASE) if mapped else (-1, 0)
        if self.libc.mmap(address, size, PROT_READ | PROT_WRITE if mapped else 0, flags, *where) != address:
            raise OSError(ctypes.get_errno(), f"cannot map {size} bytes at {address:#x}")

    def kernel(self, number: int) -> Kernel:
        """Return a kernel, which is looked up when it is first launched."""
        if number not in self.kernels:
            kernel = self.manifest.kernel(*self.learned[number])
            if kernel.name == FAULTY:
                raise Refused("it fails as it was told to")
            if kernel.name == BROKEN:
                spoil_stores(kernel)
            self.kernels[number] = kernel
        return self.kernels[number]

    def launch(self, data: bytes) -> None:
        """Run a kernel and answer: 0, or an error and its text."""
        number, *sizes, shared_bytes, count = struct.unpack("<9I", data[:36])
        values = [data[at : at + 8] for at in range(40, 40 + 8 * count, 8)]
        result, text = 0, ""
        try:
            self.kernel(number).run(tuple(sizes[:3]), tuple(sizes[3:]), shared_bytes, values)
        except Refused as refusal:
            result, text = LAUNCH_FAILED, str(refusal)
        except Exception:
            result, text = LAUNCH_FAILED, traceback.format_exc()
        answer = text.encode()
        self.connection.sendall(struct.pack("<iI", result, len(answer)) + answer)


def main() -> None:
    """Serve until the program closes its end."""
    faulthandler.enable()
    np.seterr(all="ignore")
    patch_interpreter()
    hasten_types()
    Worker().serve()


if __name__ == "__main__":
    main()
