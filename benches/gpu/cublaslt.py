"""cuBLASLt through its C interface: each algorithm that the library offers for a GEMM, launched by itself.

    C = A B    or    C += A B        row-major: A [m, k], B [k, n], C [m, n]

PyTorch takes the algorithm that the library offers first; the trainer times several (`runtime/matmul/search.rs`), and
so does gemm_sweep.py with this. The library is column-major: on the same memory it computes C^T = B^T A^T, so its left
operand is B. Descriptors are freed with the process.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

# The numbers of cublasLt.h: cudaDataType_t, cublasComputeType_t, cublasLtMatmulDescAttributes_t,
# cublasLtMatmulMatrixScale_t and cublasLtMatmulPreferenceAttributes_t.
TYPES = {"f32": 0, "bf16": 14, "e4m3": 28}
COMPUTE_32F = 68
TRANSPOSED_LEFT, TRANSPOSED_RIGHT, SCALES_LEFT, SCALES_RIGHT, FAST_ACCUMULATION = 3, 4, 17, 18, 25
SCALE_MODE_LEFT, SCALE_MODE_RIGHT = 31, 32
SCALE_MODES = {"tensor": 0, "1x32": 2, "1x128": 4, "128x128": 5}
MAX_WORKSPACE_BYTES, REDUCTION_SCHEMES = 1, 3
# Partial sums may be added in f32 in the workspace, which is deterministic: the trainer takes no other such scheme.
REDUCED_IN_WORKSPACE = 2
ALGORITHM_BYTES, STATE, PROPOSAL_BYTES = 64, 72, 96
WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True)
class Operand:
    """A or B in the GPU's memory."""

    address: int
    dtype: str
    # Whether its stored rows are the matrix's columns.
    transposed: bool = False
    # Of an e4m3 operand: which elements share a scale, a key of SCALE_MODES, and the address of the scales.
    scaling: str | None = None
    scales: int = 0


@dataclass(frozen=True)
class Gemm:
    """Sizes, operands and result of a GEMM."""

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    c_address: int
    c_dtype: str
    accumulate: bool = False
    # Of e4m3 operands: keep fewer bits of the sums.
    fast_accumulation: bool = False


class Library:
    """An opened cuBLASLt. The GPU's context must be current."""

    def __init__(self, path: str, workspace: int) -> None:
        """Open the library at `path`; `workspace` is the address of WORKSPACE_BYTES, a multiple of 256."""
        self.functions = ctypes.CDLL(path)
        self.workspace = workspace
        self.handle = self.create("cublasLtCreate")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise an error unless it succeeds."""
        if code := getattr(self.functions, name)(*arguments):
            raise RuntimeError(f"{name} answered {code}")

    def create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function that makes an object; return its handle."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def set(self, what: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Set an attribute of a `MatmulDesc` or `MatmulPreference`."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLt{what}SetAttribute", handle, attribute, ctypes.byref(value), size)


class Descriptors:
    """What the library is told about a GEMM."""

    def __init__(self, library: Library, gemm: Gemm) -> None:
        self.library, self.gemm = library, gemm
        self.operation = library.create("cublasLtMatmulDescCreate", COMPUTE_32F, TYPES["f32"])
        left, right = gemm.b, gemm.a
        self.set(TRANSPOSED_LEFT, ctypes.c_int32(left.transposed))
        self.set(TRANSPOSED_RIGHT, ctypes.c_int32(right.transposed))
        for operand, mode, pointer in (
            (left, SCALE_MODE_LEFT, SCALES_LEFT),
            (right, SCALE_MODE_RIGHT, SCALES_RIGHT),
        ):
            if operand.scaling:
                # One scale is the mode of a new descriptor, and the only one before version 12.8.
                if operand.scaling != "tensor":
                    self.set(mode, ctypes.c_int32(SCALE_MODES[operand.scaling]))
                self.set(pointer, ctypes.c_uint64(operand.scales))
        if gemm.fast_accumulation:
            self.set(FAST_ACCUMULATION, ctypes.c_int8(1))
        self.layouts = [
            self.layout(left, gemm.k, gemm.n),
            self.layout(right, gemm.m, gemm.k),
            *[self.layout(Operand(gemm.c_address, gemm.c_dtype), gemm.m, gemm.n)] * 2,
        ]

    def set(self, attribute: int, value: Any) -> None:
        self.library.set("MatmulDesc", self.operation, attribute, value)

    def layout(self, operand: Operand, rows: int, columns: int) -> ctypes.c_void_p:
        """Describe a row-major matrix of these sizes as the column-major one that lies in the same memory."""
        stored = (rows, columns) if operand.transposed else (columns, rows)
        sizes = *map(ctypes.c_uint64, stored), ctypes.c_int64(stored[0])
        return self.library.create("cublasLtMatrixLayoutCreate", TYPES[operand.dtype], *sizes)

    def algorithms(self, most: int) -> list[bytes]:
        """Return the algorithms that the library offers, in its own order of preference; none if it cannot multiply."""
        library = self.library
        preference = library.create("cublasLtMatmulPreferenceCreate")
        library.set("MatmulPreference", preference, MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))
        library.set("MatmulPreference", preference, REDUCTION_SCHEMES, ctypes.c_uint32(REDUCED_IN_WORKSPACE))
        proposals, count = ctypes.create_string_buffer(most * PROPOSAL_BYTES), ctypes.c_int()
        library.call(
            "cublasLtMatmulAlgoGetHeuristic", library.handle, self.operation, *self.layouts, preference, most,
            proposals, ctypes.byref(count),
        )  # fmt: skip
        found = [proposals.raw[at * PROPOSAL_BYTES :][:PROPOSAL_BYTES] for at in range(count.value)]
        # Behind the algorithm: the bytes of workspace, and whether the library computes the GEMM with it.
        return [one[:ALGORITHM_BYTES] for one in found if one[STATE : STATE + 4] == bytes(4)]

    def launch(self, algorithm: bytes, stream: Any) -> None:
        """Launch the GEMM with an algorithm on a stream, which is given by its address."""
        gemm, library = self.gemm, self.library
        one, beta = ctypes.c_float(1), ctypes.c_float(gemm.accumulate)
        left, right, c = (ctypes.c_uint64(address) for address in (gemm.b.address, gemm.a.address, gemm.c_address))
        layouts = self.layouts
        library.call(
            "cublasLtMatmul", library.handle, self.operation, ctypes.byref(one), left, layouts[0], right, layouts[1],
            ctypes.byref(beta), c, layouts[2], c, layouts[3], algorithm, ctypes.c_uint64(library.workspace),
            ctypes.c_size_t(WORKSPACE_BYTES), stream,
        )  # fmt: skip
