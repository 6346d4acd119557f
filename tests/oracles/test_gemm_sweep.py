"""The sweep of GEMMs multiplies what it says: by PyTorch on the CPU, by cuBLASLt on the emulated GPU."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cublaslt
import gemm_sweep
import pytest
import torch
from cuda_emulator.direct import Cuda, run
from cuda_emulator.library import Emulator, build
from gemm_sweep import Operands, Precision, Problem, describe, problems
from llama_shape import Shape

# Every size differs, and is a multiple of 16 for fp8.
TINY = Shape(
    vocab_size=97, hidden_size=64, intermediate_size=160, num_layers=1, num_attention_heads=2, num_key_value_heads=1,
    tie_embeddings=True, rope_theta=1e4, norm_epsilon=1e-5, sequence_length=48, sequences_per_step=1,
)  # fmt: skip
# What PyTorch computes on a CPU as well.
ON_CPU = [
    (problem, precision)
    for problem in problems(TINY, 1)
    for precision in [gemm_sweep.BF16, *gemm_sweep.TENSORWISE]
    if problem.output == "bf16" or (precision is not gemm_sweep.BF16 and problem.beta == 0)
]


def listed(capability: tuple[int, int]) -> list[tuple[Problem, Precision]]:
    return gemm_sweep.configurations(TINY, 1, capability)


def name(one: Any) -> str:
    return one.name if isinstance(one, Precision) else f"{one.linear}-{one.direction}-{one.beta}"


def expected(operands: Operands, beta: int) -> torch.Tensor:
    """Return the result of a GEMM whose scales are 1."""
    result: torch.Tensor = operands.a.float() @ operands.b.float() + beta * operands.c.float()
    return result


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, output: str) -> None:
    rounding = 2**-8 if output == "bf16" else 1e-5
    torch.testing.assert_close(actual.float(), wanted, rtol=rounding, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(("problem", "precision"), ON_CPU, ids=name)
def test_torch_multiplies_the_operands_as_they_are_stored(problem: Problem, precision: Precision) -> None:
    operands = Operands(torch, problem, precision, "cpu")
    assert operands.c.shape == (problem.m, problem.n)
    wanted = expected(operands, problem.beta)
    assert_close(gemm_sweep.torch_launch(torch, problem, precision, operands)(), wanted, problem.output)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_torch_has_every_call_of_the_sweep(capability: tuple[int, int]) -> None:
    """Sums of bf16 operands in f32, sums into a matrix and scales of blocks are for GPUs: here without numbers."""
    for problem, precision in listed(capability):
        operands = Operands(torch, problem, precision, "meta")
        result = gemm_sweep.torch_launch(torch, problem, precision, operands)()
        assert (result.shape, result.dtype) == ((problem.m, problem.n), operands.c.dtype), describe(problem, precision)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("cuda")
    build(folder)
    return Emulator(folder, sys.executable, {"memory": 1 << 30, "context": 64 << 20})


def raw(tensor: torch.Tensor | None) -> bytes:
    """Return a tensor's memory, column by column if it is stored so."""
    if tensor is None:
        return b""
    stored = tensor if tensor.is_contiguous() else tensor.t()
    assert stored.is_contiguous()
    return stored.reshape(-1).view(torch.uint8).numpy().tobytes()


def by_library(
    gpu: Emulator, problem: Problem, precision: Precision, operands: Operands
) -> Callable[[Cuda], list[bytes]]:
    """Return a function that multiplies on a GPU with every algorithm, and returns the results' memory."""
    gemm = operands.for_library(problem, precision)
    memory = [raw(part) for part in (operands.stored_a, operands.stored_b, operands.scales_a, operands.scales_b)]
    c = raw(operands.c)
    # By its path: PyTorch has loaded NVIDIA's, which has the same name.
    path = str(gpu.libraries / "libcublasLt.so.13")

    def body(cuda: Cuda) -> list[bytes]:
        a, b, scales_a, scales_b = (cuda.upload(part) if part else 0 for part in memory)
        library = cublaslt.Library(path, cuda.allocate(cublaslt.WORKSPACE_BYTES))
        results = []
        there = dataclasses.replace(
            gemm,
            a=dataclasses.replace(gemm.a, address=a, scales=scales_a),
            b=dataclasses.replace(gemm.b, address=b, scales=scales_b),
            c_address=cuda.upload(c),
        )
        descriptors = cublaslt.Descriptors(library, there)
        for algorithm in descriptors.algorithms(64):
            cuda.write(there.c_address, c)
            descriptors.launch(algorithm, cuda.stream)
            results.append(cuda.read(there.c_address, len(c)))
        return results

    return body


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)], ids=["hopper", "blackwell"])
def test_cublaslt_multiplies_the_same_with_every_algorithm(emulator: Emulator, capability: tuple[int, int]) -> None:
    gpu = emulator.having(capability=".".join(map(str, capability)))
    seen = set()
    for problem, precision in listed(capability):
        operands = Operands(torch, problem, precision, "cpu")
        operands.c += 3.0
        wanted = expected(operands, problem.beta)
        results = run(gpu, by_library(gpu, problem, precision, operands))
        assert len(results) > 1, describe(problem, precision)
        for result in results:
            actual = torch.frombuffer(bytearray(result), dtype=operands.c.dtype).view(problem.m, problem.n)
            assert_close(actual, wanted, problem.output)
        seen.add(precision.name)
    block_scaled = {"blockwise", "blockwise-128"} if capability == (9, 0) else {"mxfp8"}
    assert seen == {"bf16", "tensorwise", "tensorwise-fast"} | block_scaled


def test_what_the_library_refuses_is_an_error(emulator: Emulator) -> None:
    problem, hopper = problems(TINY, 1)[0], emulator.having(capability="9.0")
    operands = Operands(torch, problem, gemm_sweep.MXFP8, "cpu")
    with pytest.raises(AssertionError, match="cublasLtMatmulAlgoGetHeuristic answered 15"):
        run(hopper, by_library(hopper, problem, gemm_sweep.MXFP8, operands))


def times_of(milliseconds: list[float]) -> tuple[gemm_sweep.Timer, list[Callable[[], Any]], list[tuple[int, int]]]:
    """Return a timer for launches that take so long, the launches, and the list of what is timed; infinity fails."""
    timed: list[tuple[int, int]] = []

    def timer(launch: Callable[[], Any], runs: int) -> float:
        index: int = launch()
        timed.append((index, runs))
        if math.isinf(milliseconds[index]):
            raise RuntimeError("not on this GPU")
        return milliseconds[index]

    return timer, [lambda index=index: index for index in range(len(milliseconds))], timed  # type: ignore[misc]


def test_the_search_says_what_more_candidates_are_worth() -> None:
    milliseconds = [1.0] * 64
    milliseconds[3], milliseconds[40], milliseconds[5] = 0.8, 0.5, math.inf
    timer, launches, timed = times_of(milliseconds)
    found = gemm_sweep.search(timer, launches)
    assert found == {
        "candidates": 64, "chosen": 40, "milliseconds": 0.5, "first_milliseconds": 1.0,
        "best_of_16_milliseconds": 0.8, "best_milliseconds": 0.5,
    }  # fmt: skip
    assert [(index, runs) for index, runs in timed if runs > 3] == [(0, 200), (3, 250), (40, 400)], "200 ms each"


def test_a_search_among_few_candidates_is_the_same_for_all() -> None:
    timer, launches, _ = times_of([2.0, 1.0])
    found = gemm_sweep.search(timer, launches)
    assert (found["best_of_16_milliseconds"], found["best_milliseconds"], found["candidates"]) == (1.0, 1.0, 2)


def test_a_first_candidate_that_fails_has_no_time() -> None:
    timer, launches, _ = times_of([math.inf, 1.0])
    assert gemm_sweep.search(timer, launches)["first_milliseconds"] is None
    timer, launches, _ = times_of([math.inf, math.inf])
    with pytest.raises(RuntimeError, match="none of the 2 algorithms"):
        gemm_sweep.search(timer, launches)


def test_the_gemms_are_those_of_the_block(tmp_path: Path) -> None:
    """Their FLOPs are those of the block's weights."""
    once = [problem for problem in problems(TINY, 1) if problem.beta == 0]
    weights = sum(problem.n * problem.k for problem in once if problem.direction == "forward")
    assert sum(problem.flops for problem in once) == 6 * TINY.sequence_length * weights
    head = TINY.vocab_size * TINY.hidden_size
    attention = TINY.hidden_size * TINY.sequence_length
    assert TINY.flops_per_token() == 6 * (weights + head + attention)
