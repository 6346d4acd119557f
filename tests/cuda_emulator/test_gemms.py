"""The emulated cuBLASLt multiplies what its layouts describe, and refuses what the library refuses."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from cuda_emulator.direct import Cuda, run
from cuda_emulator.gemms import (
    ALGORITHM_BYTES,
    BF16,
    COMPUTE_TYPE,
    F32,
    IN_PLACE,
    INVALID_VALUE,
    NONE,
    NOT_SUPPORTED,
    SUCCESS,
    Library,
    Matrix,
)
from cuda_emulator.library import Emulator

TYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]


@pytest.mark.parametrize(("operands", "result"), TYPES)
@pytest.mark.parametrize(("transposed_a", "transposed_b"), list(itertools.product([False, True], repeat=2)))
def test_gemms_agree_with_numpy(
    emulator: Emulator, operands: int, result: int, transposed_a: bool, transposed_b: bool
) -> None:
    m, n, k = 24, 9, 40
    matrix_a = Matrix(operands, k if transposed_a else m, m if transposed_a else k, 48)
    matrix_b = Matrix(operands, n if transposed_b else k, k if transposed_b else n, 56)
    matrix_c = Matrix(result, m, n, 32)
    random = np.random.default_rng(7)
    stored = [matrix.stored(random) for matrix in (matrix_a, matrix_b, matrix_c)]

    def body(cuda: Cuda) -> list[bytes]:
        library = Library(cuda)
        description = library.description(transposed_a, transposed_b)
        layouts = [library.layout(matrix) for matrix in (matrix_a, matrix_b, matrix_c, matrix_c)]
        return library.multiply_by_all(description, layouts, stored)

    outputs = run(emulator, body)
    a, b, before = (
        matrix.values(data.tobytes()) for matrix, data in zip((matrix_a, matrix_b, matrix_c), stored, strict=True)
    )
    gemm = (a.T if transposed_a else a) @ (b.T if transposed_b else b)
    for index, output in enumerate(outputs):
        expected = gemm + (before if index >= 3 else 0)
        # bf16 keeps 8 bits; sums of 40 products in F32 differ by their order.
        np.testing.assert_allclose(matrix_c.values(output), expected, rtol=2**-8 if result == BF16 else 1e-5, atol=1e-4)
    if result == F32:
        assert len(set(outputs)) == len(outputs), "the algorithms cannot be told apart"


def square(
    library: Library, size: int = 64, kind: int = BF16, result: int = F32, leading: int | None = None
) -> tuple[Any, list[Any]]:
    operand, target = Matrix(kind, size, size, leading or size), Matrix(result, size, size, leading or size)
    return library.description(False, False), [library.layout(one) for one in (operand, operand, target, target)]


def test_what_is_proposed_keeps_to_the_preferences(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        description, layouts = square(library)
        assert len(library.proposals(description, layouts)) == 3
        assert len(library.proposals(description, layouts, schemes=COMPUTE_TYPE | IN_PLACE)) == 4
        assert len(library.proposals(description, layouts, schemes=NONE)) == 2
        assert len(library.proposals(description, layouts, workspace=0)) == 2
        assert len(library.proposals(description, layouts, alignment=8)) == 1
        description, layouts = square(library, leading=65)
        assert len(library.proposals(description, layouts)) == 1
        description, layouts = square(library, kind=F32, result=BF16)
        assert library.proposals(description, layouts) == []

    run(emulator, body)


def test_an_in_place_sum_is_never_the_same_twice(emulator: Emulator) -> None:
    """The reason to mask out such algorithms. The sum is repeated, as its order is random."""
    stored = Matrix(BF16, 64, 64, 64).stored(np.random.default_rng(3)).tobytes()

    def body(cuda: Cuda) -> int:
        library = Library(cuda)
        description, layouts = square(library)
        (algorithm,) = [
            one
            for one in library.proposals(description, layouts, schemes=COMPUTE_TYPE | IN_PLACE)
            if one[32:36] == b"\1\0\0\0"
        ]
        a, c = cuda.upload(stored), cuda.allocate(4 * 64 * 64)
        cuda.call("cuMemsetD8Async", ctypes.c_uint64(c), 63, ctypes.c_size_t(4 * 64 * 64), cuda.stream)
        results = set()
        for _ in range(20):
            fresh = cuda.upload(np.full(64 * 64, 0.3, np.float32).tobytes())
            assert library.multiply(description, layouts, [a, a, fresh], algorithm, 1.0) == SUCCESS
            results.add(cuda.read(fresh, 4 * 64 * 64))
        return len(results)

    assert run(emulator, body) > 1


def test_invalid_gemm_arguments_are_refused(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        description, layouts = square(library)
        fast, split, any_alignment = library.proposals(description, layouts)
        a, c, workspace = cuda.allocate(1 << 15), cuda.allocate(1 << 15), cuda.allocate(1 << 20)

        def answer(
            a: int = a, c: int = c, algorithm: bytes = split, workspace: int = workspace, size: int = 1 << 20
        ) -> int:
            return library.multiply(description, layouts, [a, a, c], algorithm, 0.0, workspace, size)

        assert answer() == SUCCESS
        assert answer(size=100) == INVALID_VALUE
        assert answer(workspace=workspace + 16) == INVALID_VALUE
        assert answer(a=a + 2) == NOT_SUPPORTED
        assert answer(c=c + 4, algorithm=fast) == NOT_SUPPORTED
        assert answer(a=a + 2, algorithm=any_alignment) == SUCCESS
        assert answer(algorithm=b"\0" * ALGORITHM_BYTES) == INVALID_VALUE
        too_short = library.layout(Matrix(BF16, 64, 64, 63))
        assert library.multiply(description, [too_short, *layouts[1:]], [a, a, c], any_alignment) == INVALID_VALUE
        other = library.layout(Matrix(BF16, 64, 32, 64))
        assert library.multiply(description, [other, *layouts[1:]], [a, a, c], any_alignment) == INVALID_VALUE

    run(emulator, body)


def test_another_version_of_the_library_refuses_kept_choices(emulator: Emulator) -> None:
    def propose(cuda: Cuda) -> bytes:
        library = Library(cuda)
        return library.proposals(*square(library))[0]

    algorithm = run(emulator, propose)

    def body(cuda: Cuda) -> int:
        library = Library(cuda)
        description, layouts = square(library)
        return library.check(description, layouts, algorithm)

    assert run(emulator, body) == SUCCESS
    assert run(emulator.having(cublas=130200), body) == INVALID_VALUE


def test_the_fastest_algorithm_depends_on_the_day(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> list[float]:
        library = Library(cuda)
        description, layouts = square(library)
        a, c, workspace = cuda.allocate(1 << 15), cuda.allocate(1 << 15), cuda.allocate(1 << 20)
        times = []
        for algorithm in library.proposals(description, layouts):
            start, end = cuda.new_handle("cuEventCreate", 0), cuda.new_handle("cuEventCreate", 0)
            cuda.call("cuEventRecord", start, cuda.stream)
            library.multiply(description, layouts, [a, a, c], algorithm, 0.0, workspace, 1 << 20)
            cuda.call("cuEventRecord", end, cuda.stream)
            cuda.call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            cuda.call("cuEventElapsedTime_v2", ctypes.byref(milliseconds), start, end)
            times.append(milliseconds.value)
        return times

    days = {day: run(emulator.having(timing=day), body) for day in range(4)}
    assert days[0] == run(emulator.having(timing=0), body)
    assert len({min(range(3), key=times.__getitem__) for times in days.values()}) > 1
