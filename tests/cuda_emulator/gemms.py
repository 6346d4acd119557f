"""Calls the emulated cuBLASLt from Python, as the trainer calls it."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda_emulator.direct import Cuda

F32, BF16, E4M3, COMPUTE_32F = 0, 14, 28, 68
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
PROPOSAL_BYTES, ALGORITHM_BYTES = 96, 64
NONE, IN_PLACE, COMPUTE_TYPE = 0, 1, 2
STORED = {F32: np.float32, BF16: np.uint16, E4M3: np.uint8}


@dataclass
class Matrix:
    """A matrix, column-major in memory: `stored[column, row]`."""

    kind: int
    rows: int
    columns: int
    leading_dimension: int

    def stored(self, random: np.random.Generator) -> np.ndarray:
        shape = self.columns, self.leading_dimension
        if self.kind == E4M3:
            return random.choice(np.flatnonzero(np.isfinite(E4M3_VALUES)), shape).astype(np.uint8)
        values = random.standard_normal(shape).astype(np.float32)
        return values if self.kind == F32 else to_bf16(values)

    def values(self, data: bytes) -> np.ndarray:
        raw = np.frombuffer(data, STORED[self.kind])
        if self.kind == BF16:
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        elif self.kind == E4M3:
            raw = E4M3_VALUES[raw]
        values: np.ndarray = raw.reshape(self.columns, self.leading_dimension)[:, : self.rows].T
        return values


def e4m3_values() -> np.ndarray:
    """Return the number behind each of the 256 codes of e4m3fn."""
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[(exponent == 15) & (mantissa == 7)] = np.nan
    values: np.ndarray = np.where(sign, -magnitude, magnitude).astype(np.float32)
    return values


E4M3_VALUES = e4m3_values()


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits: np.ndarray = values.view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


class Library:
    """cublasLt as the trainer calls it."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.blas = cuda, cuda.blas
        self.handle = ctypes.c_void_p()
        self.blas.cublasLtCreate(ctypes.byref(self.handle))

    def layout(self, matrix: Matrix, batch: int = 1) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        sizes = ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.leading_dimension)
        self.blas.cublasLtMatrixLayoutCreate(ctypes.byref(handle), matrix.kind, *sizes)
        if batch != 1:
            count = ctypes.c_int32(batch)
            assert self.blas.cublasLtMatrixLayoutSetAttribute(handle, 5, ctypes.byref(count), ctypes.c_size_t(4)) == 0
        return handle

    def description(self, transposed_a: bool, transposed_b: bool) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.blas.cublasLtMatmulDescCreate(ctypes.byref(handle), COMPUTE_32F, F32)
        for attribute, value in ((3, transposed_a), (4, transposed_b)):
            assert self.set(handle, attribute, ctypes.c_int32(value)) == SUCCESS
        return handle

    def set(self, description: Any, attribute: int, value: Any) -> int:
        """Set an attribute of a matmul's description; return the answer."""
        answer: int = self.blas.cublasLtMatmulDescSetAttribute(
            description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        return answer

    def proposals(
        self,
        description: Any,
        layouts: list[Any],
        workspace: int = 32 << 20,
        schemes: int = COMPUTE_TYPE,
        alignment: int = 256,
    ) -> list[bytes]:
        """Return the algorithms that the library proposes; an empty list when it has none."""
        preference = ctypes.c_void_p()
        self.blas.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        attributes: list[tuple[int, Any]] = [(1, ctypes.c_uint64(workspace)), (3, ctypes.c_uint32(schemes))]
        attributes += [(attribute, ctypes.c_uint32(alignment)) for attribute in (5, 6, 7, 8)]
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            assert self.blas.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size) == 0
        count, results = ctypes.c_int(), ctypes.create_string_buffer(16 * PROPOSAL_BYTES)
        self.blas.cublasLtMatmulAlgoGetHeuristic(
            self.handle, description, *layouts, preference, 16, results, ctypes.byref(count)
        )
        return [results.raw[at * PROPOSAL_BYTES :][:ALGORITHM_BYTES] for at in range(count.value)]

    def check(self, description: Any, layouts: list[Any], algorithm: bytes) -> int:
        """Ask whether an algorithm is one for this matmul; return the answer."""
        proposal = ctypes.create_string_buffer(PROPOSAL_BYTES)
        answer: int = self.blas.cublasLtMatmulAlgoCheck(self.handle, description, *layouts, algorithm, proposal)
        return answer

    def multiply(
        self,
        description: Any,
        layouts: list[Any],
        addresses: list[int],
        algorithm: bytes,
        beta: float = 0,
        workspace: int = 0,
        size: int = 0,
    ) -> int:
        a, b, c = (ctypes.c_uint64(address) for address in addresses)
        one, factor = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(beta))
        answer: int = self.blas.cublasLtMatmul(
            self.handle, description, one, a, layouts[0], b, layouts[1], factor, c, layouts[2], c, layouts[3],
            algorithm, ctypes.c_uint64(workspace), ctypes.c_size_t(size), self.cuda.stream,
        )  # fmt: skip
        return answer

    def multiply_by_all(self, description: Any, layouts: list[Any], stored: list[np.ndarray]) -> list[bytes]:
        """Return A B and then A B + C, each by every algorithm; `stored` are A, B and C as they lie in memory."""
        workspace = self.cuda.allocate(1 << 20)
        a, b = (self.cuda.upload(one.tobytes()) for one in stored[:2])
        algorithms = self.proposals(description, layouts)
        assert len(algorithms) == 3
        outputs = []
        for beta, algorithm in itertools.product((0.0, 1.0), algorithms):
            c = self.cuda.upload(stored[2].tobytes())
            assert self.multiply(description, layouts, [a, b, c], algorithm, beta, workspace, 1 << 20) == SUCCESS
            outputs.append(self.cuda.read(c, stored[2].nbytes))
        return outputs
