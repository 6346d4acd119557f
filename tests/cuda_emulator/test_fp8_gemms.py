"""The emulated cuBLASLt multiplies fp8 operands by their scales, and refuses what the library refuses of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cuda_emulator.direct import Cuda, run
from cuda_emulator.gemms import (
    BF16,
    E4M3,
    E4M3_VALUES,
    F32,
    INVALID_VALUE,
    NOT_SUPPORTED,
    SUCCESS,
    Library,
    Matrix,
)
from cuda_emulator.library import Emulator

SCALE_POINTERS, FAST_ACCUMULATION, SCALE_MODES = (17, 18), 25, (31, 32)
SCALAR, VEC16, VEC32, OUTER_VECTOR, VEC128, BLOCK128, UNKNOWN = range(7)
CODE_OF_ONE, ILLEGAL_ADDRESS = 0x38, 700


@dataclass(frozen=True)
class Gemm:
    """D = op(A) op(B) as a GEMM of fp8 operands has to be, none of whose sizes is a multiple of 128."""

    modes: tuple[int, int] = (SCALAR, SCALAR)
    m: int = 48
    n: int = 144
    k: int = 272
    kinds: tuple[int, int, int, int] = (E4M3, E4M3, F32, F32)
    transposed: tuple[bool, bool] = (True, False)
    leading_dimensions: tuple[int, int, int] = (288, 304, 64)
    batch: int = 1

    def matrices(self) -> list[Matrix]:
        a = (self.k, self.m) if self.transposed[0] else (self.m, self.k)
        b = (self.n, self.k) if self.transposed[1] else (self.k, self.n)
        leading_a, leading_b, leading_c = self.leading_dimensions
        shapes = ((*a, leading_a), (*b, leading_b), (self.m, self.n, leading_c), (self.m, self.n, leading_c))
        return [Matrix(kind, *shape) for kind, shape in zip(self.kinds, shapes, strict=True)]

    def layouts(self, library: Library) -> list[Any]:
        return [library.layout(matrix, self.batch) for matrix in self.matrices()]

    def description(self, library: Library, scales: tuple[int, int] = (0, 0)) -> Any:
        handle = library.description(*self.transposed)
        for attribute, address in zip(SCALE_POINTERS, scales, strict=True):
            assert library.set(handle, attribute, ctypes.c_uint64(address)) == SUCCESS
        for attribute, mode in zip(SCALE_MODES, self.modes, strict=True):
            assert library.set(handle, attribute, ctypes.c_int32(mode)) == SUCCESS
        return handle


def ceil(size: int, block: int) -> int:
    return -(-size // block)


def pack(mode: int, scales_OK: np.ndarray) -> bytes:
    """Return the scales of an operand's blocks (outer axis, k) as they lie in memory, with NaN as padding."""
    outer, blocks = scales_OK.shape
    packed = scales_OK.T
    if mode == BLOCK128:
        packed = np.pad(scales_OK, ((0, 0), (0, -blocks % 4)), constant_values=np.nan)
    elif mode == VEC32:
        padded = np.pad(scales_OK, ((0, -outer % 128), (0, -blocks % 4)), constant_values=np.nan)
        codes = np.where(np.isnan(padded), 255, np.log2(padded) + 127).astype(np.uint8)
        packed = codes.reshape(ceil(outer, 128), 4, 32, ceil(blocks, 4), 4).transpose(0, 3, 2, 1, 4)
    data: bytes = packed.tobytes()
    return data


def random_scales(random: np.random.Generator, mode: int, outer: int, k: int) -> tuple[bytes, np.ndarray]:
    """Return scales as they lie in memory, and the factor of each element: [outer, k]."""
    blocks = {SCALAR: (outer, k), VEC32: (1, 32), VEC128: (1, 128), BLOCK128: (128, 128)}
    rows, columns = blocks[mode]
    scales = np.exp2(random.integers(-4, 5, (ceil(outer, rows), ceil(k, columns)))).astype(np.float32)
    return pack(mode, scales), scales.repeat(rows, 0)[:outer].repeat(columns, 1)[:, :k]


MULTIPLIED = [
    ("8.9", (SCALAR, SCALAR)),
    ("9.0", (SCALAR, SCALAR)),
    ("12.0", (SCALAR, SCALAR)),
    ("9.0", (VEC128, VEC128)),
    ("9.0", (VEC128, BLOCK128)),
    ("9.0", (BLOCK128, VEC128)),
    ("10.0", (VEC32, VEC32)),
    ("12.0", (VEC32, VEC32)),
]


@pytest.mark.parametrize("result", [F32, BF16])
@pytest.mark.parametrize(("capability", "modes"), MULTIPLIED)
def test_fp8_gemms_agree_with_numpy(emulator: Emulator, capability: str, modes: tuple[int, int], result: int) -> None:
    # Each operand once has more than one block of 128 along both of its axes.
    many_columns = Gemm(modes, kinds=(E4M3, E4M3, result, result))
    many_rows = replace(many_columns, m=272, n=48, k=656, leading_dimensions=(656, 672, 272))
    for gemm in (many_columns, many_rows):
        check_against_numpy(emulator.having(capability=capability), gemm)


def check_against_numpy(emulator: Emulator, gemm: Gemm) -> None:
    random = np.random.default_rng(7)
    matrices = gemm.matrices()[:3]
    stored = [matrix.stored(random) for matrix in matrices]
    scales_a, factors_a = random_scales(random, gemm.modes[0], gemm.m, gemm.k)
    scales_b, factors_b = random_scales(random, gemm.modes[1], gemm.n, gemm.k)

    def body(cuda: Cuda) -> list[bytes]:
        library = Library(cuda)
        description = gemm.description(library, (cuda.upload(scales_a), cuda.upload(scales_b)))
        return library.multiply_by_all(description, gemm.layouts(library), stored)

    outputs = run(emulator, body)
    a, b, before = (
        matrix.values(data.tobytes()).astype(np.float64) for matrix, data in zip(matrices, stored, strict=True)
    )
    a, b = a.T * factors_a, b * factors_b.T
    # Each of k additions rounds a sum that is at most this large; bf16 keeps 8 bits of the result.
    largest = np.abs(a) @ np.abs(b) + np.abs(before)
    for index, output in enumerate(outputs):
        expected = a @ b + (before if index >= 3 else 0)
        bound = gemm.k * 2**-24 * largest + (2**-8 * np.abs(expected) if BF16 in gemm.kinds else 0)
        assert np.all(np.abs(matrices[2].values(output) - expected) <= bound)
    if F32 in gemm.kinds:
        assert len(set(outputs)) == len(outputs), "the algorithms cannot be told apart"


def multiply_ones(emulator: Emulator, codes: np.ndarray, mode: int, scales: bytes, other_scales: bytes) -> np.ndarray:
    """Return the sums of matrix A, which has a code of e4m3fn in each row, times a scale of that row."""
    gemm = Gemm((mode, mode), len(codes), 16, 16, leading_dimensions=(16, 16, len(codes)))
    a, b = np.zeros((len(codes), 16), np.uint8), np.full((16, 16), CODE_OF_ONE, np.uint8)
    a[:, 0] = codes

    def body(cuda: Cuda) -> bytes:
        library = Library(cuda)
        description = gemm.description(library, (cuda.upload(scales), cuda.upload(other_scales)))
        layouts, c = gemm.layouts(library), cuda.allocate(4 * 16 * len(codes))
        algorithm = library.proposals(description, layouts, workspace=0)[0]
        addresses = [cuda.upload(a.tobytes()), cuda.upload(b.tobytes()), c]
        assert library.multiply(description, layouts, addresses, algorithm) == SUCCESS
        return cuda.read(c, 4 * 16 * len(codes))

    return gemm.matrices()[2].values(run(emulator, body))[:, 0]


def test_every_code_of_e4m3_is_decoded(emulator: Emulator) -> None:
    one = np.float32(1).tobytes()
    np.testing.assert_array_equal(multiply_ones(emulator, np.arange(256), SCALAR, one, one), E4M3_VALUES)
    assert np.nanmax(E4M3_VALUES) == 448
    assert np.count_nonzero(np.isnan(E4M3_VALUES)) == 2


def test_every_code_of_ue8m0_is_decoded(emulator: Emulator) -> None:
    expected = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)
    scales, ones = pack(VEC32, expected[:, None].astype(np.float64)), pack(VEC32, np.ones((16, 1)))
    np.testing.assert_array_equal(multiply_ones(emulator, np.full(256, CODE_OF_ONE), VEC32, scales, ones), expected)


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize(
    ("capability", "modes"),
    [
        ("12.0", (SCALAR, SCALAR)),
        ("9.0", (VEC128, BLOCK128)),
        ("9.0", (BLOCK128, VEC128)),
        ("12.0", (VEC32, VEC32)),
    ],
)
def test_a_scale_outside_of_its_allocation_is_a_fault(
    emulator: Emulator, capability: str, modes: tuple[int, int], operand: int
) -> None:
    gemm, random = Gemm(modes), np.random.default_rng(7)
    scales = [
        random_scales(random, mode, outer, gemm.k)[0] for mode, outer in zip(modes, (gemm.m, gemm.n), strict=True)
    ]
    scales[operand] = scales[operand][:-1]

    def body(cuda: Cuda) -> int:
        library = Library(cuda)
        description = gemm.description(library, (cuda.upload(scales[0]), cuda.upload(scales[1])))
        layouts = gemm.layouts(library)
        algorithm = library.proposals(description, layouts, workspace=0)[0]
        addresses = [cuda.allocate(1 << 16) for _ in range(3)]
        assert library.multiply(description, layouts, addresses, algorithm) == SUCCESS
        return cuda.synchronize()

    assert run(emulator.having(capability=capability), body) == ILLEGAL_ADDRESS


def test_scale_addresses_are_those_of_the_call(emulator: Emulator) -> None:
    gemm = Gemm()

    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        one, two = (cuda.upload(np.float32(scale).tobytes()) for scale in (1, 2))
        description, layouts = gemm.description(library, (one, one)), gemm.layouts(library)
        algorithm = library.proposals(description, layouts, workspace=0)[0]
        ones = cuda.upload(bytes([CODE_OF_ONE]) * (1 << 16))
        outputs = [cuda.allocate(1 << 16) for _ in range(3)]
        assert library.multiply(description, layouts, [ones, ones, outputs[0]], algorithm) == SUCCESS
        assert library.set(description, SCALE_POINTERS[1], ctypes.c_uint64(two)) == SUCCESS
        assert library.multiply(description, layouts, [ones, ones, outputs[1]], algorithm) == SUCCESS
        assert library.set(description, FAST_ACCUMULATION, ctypes.c_int8(1)) == SUCCESS
        assert library.multiply(description, layouts, [ones, ones, outputs[2]], algorithm) == SUCCESS
        firsts = [np.frombuffer(cuda.read(output, 4), np.float32)[0] for output in outputs]
        assert firsts == [gemm.k, 2 * gemm.k, 2 * gemm.k]

    run(emulator, body)


SCALARS, VECTORS32 = {(SCALAR, SCALAR)}, {(VEC32, VEC32)}
BLOCKS128 = {(VEC128, VEC128), (VEC128, BLOCK128), (BLOCK128, VEC128)}


@pytest.mark.parametrize(
    ("capability", "version", "modes"),
    [
        ("8.0", 130100, set()),
        ("8.6", 130100, set()),
        ("8.9", 130100, SCALARS),
        ("9.0", 120800, SCALARS),
        ("9.0", 120900, SCALARS | BLOCKS128),
        ("9.0", 130100, SCALARS | BLOCKS128),
        ("10.0", 120800, SCALARS | VECTORS32),
        ("10.3", 130100, SCALARS | VECTORS32),
        ("12.0", 130100, SCALARS | VECTORS32),
    ],
)
def test_scale_modes_depend_on_gpu_and_version(
    emulator: Emulator, capability: str, version: int, modes: set[tuple[int, int]]
) -> None:
    def body(cuda: Cuda) -> set[tuple[int, int]]:
        library = Library(cuda)
        layouts = Gemm().layouts(library)
        pairs = [(a, b) for a in range(UNKNOWN + 1) for b in range(UNKNOWN + 1)]
        return {pair for pair in pairs if library.proposals(Gemm(pair).description(library), layouts)}

    assert run(emulator.having(capability=capability, cublas=version), body) == modes


def test_scale_modes_are_unknown_before_cublas_12_8(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        description, layouts = library.description(True, False), Gemm().layouts(library)
        for attribute in SCALE_MODES:
            assert library.set(description, attribute, ctypes.c_int32(SCALAR)) == NOT_SUPPORTED
        assert len(library.proposals(description, layouts)) == 3

    run(emulator.having(capability="9.0", cublas=120700), body)


REFUSED = [
    # Operands that do not both lie along k, and batches.
    *(replace(Gemm(), transposed=transposed) for transposed in [(False, False), (True, True), (False, True)]),
    replace(Gemm(), batch=2),
    # Sizes and leading dimensions that are no multiples of 16, and columns of D that are none of 16 bytes.
    replace(Gemm(), m=40),
    replace(Gemm(), n=136),
    replace(Gemm(), k=264),
    *(replace(Gemm(), leading_dimensions=sizes) for sizes in [(280, 304, 64), (288, 312, 64), (288, 304, 50)]),
    # Mixtures of types, results in fp8, and scales of operands that are not fp8.
    *(replace(Gemm(), kinds=(*operands, F32, F32)) for operands in [(E4M3, BF16), (BF16, E4M3), (E4M3, F32)]),
    *(replace(Gemm(), kinds=(E4M3, E4M3, *results)) for results in [(F32, BF16), (BF16, F32), (E4M3, E4M3)]),
    *(replace(Gemm(), kinds=(*operands, F32, F32)) for operands in [(BF16, BF16), (F32, F32)]),
]


def test_invalid_fp8_gemms_are_refused(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        scales = cuda.upload(np.float32(1).tobytes()), cuda.upload(np.float32(1).tobytes())
        addresses = [cuda.allocate(1 << 18) for _ in range(3)]
        algorithm = library.proposals(Gemm().description(library), Gemm().layouts(library), workspace=0)[0]
        for gemm in REFUSED:
            description, layouts = gemm.description(library, scales), gemm.layouts(library)
            assert library.proposals(description, layouts) == [], gemm
            assert library.check(description, layouts, algorithm) == NOT_SUPPORTED, gemm
            assert library.multiply(description, layouts, addresses, algorithm) == NOT_SUPPORTED, gemm

    run(emulator, body)


def test_scale_modes_of_bf16_operands_are_refused(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library = Library(cuda)
        gemm = replace(Gemm(), kinds=(BF16, BF16, F32, F32))
        layouts = gemm.layouts(library)
        assert len(library.proposals(gemm.description(library), layouts)) == 3
        for modes in [(VEC32, VEC32), (VEC32, SCALAR), (SCALAR, VEC32)]:
            assert library.proposals(replace(gemm, modes=modes).description(library), layouts) == []
        for scales in [(4096, 0), (0, 4096)]:
            assert library.proposals(gemm.description(library, scales), layouts) == []

    run(emulator, body)


def test_missing_scales_and_unaligned_addresses_are_refused(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        library, gemm = Library(cuda), Gemm()
        description, layouts = gemm.description(library), gemm.layouts(library)
        algorithms = library.proposals(description, layouts)
        assert len(algorithms) == 3
        assert library.proposals(description, layouts, alignment=8) == []
        workspace = cuda.allocate(1 << 20)
        a, b, c, scale_a, scale_b = (cuda.allocate(1 << 17) for _ in range(5))

        for algorithm in algorithms:
            # What is asked before a launch needs no scales yet.
            assert library.check(description, layouts, algorithm) == SUCCESS

            def answer(
                a: int = a, b: int = b, c: int = c, scales: tuple[int, int] = (scale_a, scale_b),
                algorithm: bytes = algorithm,
            ) -> int:  # fmt: skip
                description = gemm.description(library, scales)
                return library.multiply(description, layouts, [a, b, c], algorithm, 0.0, workspace, 1 << 20)

            assert answer() == answer(a + 16, b + 16, c + 16, (scale_a + 16, scale_b + 16)) == SUCCESS
            assert answer(scales=(0, scale_b)) == answer(scales=(scale_a, 0)) == INVALID_VALUE
            assert answer(a=a + 8) == answer(b=b + 8) == answer(c=c + 8) == NOT_SUPPORTED
            assert answer(scales=(scale_a + 8, scale_b)) == answer(scales=(scale_a, scale_b + 4)) == NOT_SUPPORTED

    run(emulator, body)
