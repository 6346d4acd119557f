"""Runs kernels on a CPU, in Triton's interpreter. Import this before any kernel: it sets TRITON_INTERPRET.

The interpreter stores bf16 as 16-bit patterns and silently gets three things wrong: `tl.dot` multiplies the patterns as
integers, f32 -> bf16 truncates where a GPU rounds to nearest even, and bf16 -> f32 flushes subnormal numbers. It also
broadcasts a scalar comparison with the type of the operands instead of boolean, which `tl.load` rejects as a mask. The
functions below replace its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from declaration import Kernel
from triton.runtime import interpreter

_dot = interpreter.InterpreterBuilder.create_dot
_convert_float = interpreter._convert_float
_TYPES = {
    "torch.bfloat16": "*bf16",
    "torch.float32": "*fp32",
    "torch.int32": "*i32",
    "torch.uint32": "*u32",
    "torch.int16": "*i16",
    "torch.uint8": "*u8",
}


def launch(kernel: Kernel, grid: Sequence[int], *arguments: Any) -> None:
    """Run a declared kernel on CPU tensors and numbers, after checking them against its declaration."""
    if len(arguments) != len(kernel.arguments):
        raise TypeError(f"{kernel.name} takes {list(kernel.arguments)}, given are {len(arguments)} arguments")
    for argument, (name, declared) in zip(arguments, kernel.arguments.items(), strict=True):
        kind, divisible = declared.removesuffix(":16"), declared.endswith(":16")
        actual = _TYPES.get(str(getattr(argument, "dtype", None)), {int: "i32", float: "fp32"}.get(type(argument)))
        value = argument.data_ptr() if kind.startswith("*") and actual == kind else argument
        if actual != kind or (divisible and value % 16):
            raise TypeError(f"{kernel.name}: `{name}` is {declared}, given is {actual} {value}")
    arguments_by_name = dict(zip(kernel.arguments, arguments, strict=True))
    kernel.function[tuple(grid)](**arguments_by_name, **kernel.constants)


def _to_f32(tensor: interpreter.TensorHandle) -> np.ndarray:
    is_bf16 = tensor.dtype.scalar == tl.bfloat16
    return (tensor.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else tensor.data


def _create_dot(builder: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return _dot(builder, a, b, accumulator, *rest)
    product = np.matmul(_to_f32(a), _to_f32(b), dtype=accumulator.data.dtype)
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    if source == tl.bfloat16 and target == tl.float32:
        return data.astype(np.uint32) << 16
    if source != tl.float32 or target != tl.bfloat16:
        return _convert_float(data, source, target, rounding)
    # Half a unit of the last place that is kept, less one if that place is even: ties go to even.
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    nearest_even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FFF), nearest_even)


def _create_splat(_builder: Any, block: Any, scalar: Any) -> Any:
    value = scalar.data.reshape(-1)[0]
    return interpreter.TensorHandle(np.full(block.shape, value, dtype=scalar.data.dtype), scalar.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_splat = _create_splat
interpreter._convert_float = _convert
