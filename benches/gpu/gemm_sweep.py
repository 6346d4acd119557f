"""Times the GEMMs of a config's blocks on a GPU, in bf16 and in fp8 with each kind of scales that the GPU has.

    python benches/gpu/gemm_sweep.py --config configs/rtx5090_1b.yaml              a JSON line per GEMM and library
    python benches/gpu/gemm_sweep.py --config configs/rtx5090_1b.yaml --dry-run    the list of GEMMs, without a GPU

Each GEMM runs by PyTorch (`torch.matmul`, `torch._scaled_mm`, `torch.nn.functional.scaled_mm`), which takes what
cuBLASLt offers first, and by cuBLASLt itself (cublaslt.py), which offers up to 64 algorithms: all are timed briefly,
then the first, the fastest of the first 16 and the fastest of all for 200 ms each, so that clocks settle at the power
limit. Results are bf16 in forward and in the gradients of inputs, f32 in the gradients of weights, overwritten (beta
0) or added to (beta 1). Operands are random, since a GPU multiplies zeros with less power, and the same in every
launch: what fits in its L2 cache is read from there. Scales are all 1, which takes the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cublaslt import WORKSPACE_BYTES, Descriptors, Gemm, Library, Operand
from llama_shape import Shape, read_shape

CANDIDATES, FORMER_CANDIDATES = 64, 16
SUSTAINED_MILLISECONDS = 200.0
# A candidate that is slower than the fastest by this factor is timed once.
HOPELESS = 1.5


@dataclass(frozen=True)
class Problem:
    """A GEMM of the training step: C [m, n] = A [m, k] B [k, n]. In bf16 its operands lie as the trainer has them."""

    linear: str
    direction: str
    m: int
    n: int
    k: int
    # Whether the stored rows of an operand are the matrix's columns.
    a_transposed: bool
    b_transposed: bool
    beta: int = 0

    @property
    def output(self) -> str:
        """The element type of the result: f32 where gradients of weights are summed over micro-batches."""
        return "f32" if self.direction == "backward_weight" else "bf16"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Precision:
    """Element type of the operands, and of fp8 operands which elements share a scale: a key of SCALE_MODES."""

    name: str
    scaling_a: str | None = None
    scaling_b: str | None = None
    fast_accumulation: bool = False


BF16 = Precision("bf16")
TENSORWISE = [Precision("tensorwise", "tensor", "tensor"), Precision("tensorwise-fast", "tensor", "tensor", True)]
BLOCKWISE, WEIGHT_BLOCKS = Precision("blockwise", "1x128", "1x128"), Precision("blockwise-128", "1x128", "128x128")
MXFP8 = Precision("mxfp8", "1x32", "1x32")


def problems(shape: Shape, micro_batch: int) -> list[Problem]:
    """Return the GEMMs of a block, those with the most FLOPs first."""
    tokens, hidden, inner = micro_batch * shape.sequence_length, shape.hidden_size, shape.intermediate_size
    packed = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_size
    linears = {
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "qkv": (hidden, packed),
        "out": (shape.num_attention_heads * shape.head_size, hidden),
    }
    found = []
    for name, (inputs, outputs) in linears.items():
        found += [
            # x [N, I] and w [O, I] -> y [N, O]
            Problem(name, "forward", tokens, outputs, inputs, False, True),
            # dy [N, O] and w [O, I] -> dx [N, I]
            Problem(name, "backward_input", tokens, inputs, outputs, False, False),
            # dy [N, O] and x [N, I] -> dw [O, I]
            *[Problem(name, "backward_weight", outputs, inputs, tokens, True, False, beta) for beta in (0, 1)],
        ]
    return found


def precisions(problem: Problem, capability: tuple[int, int]) -> list[Precision]:
    """Return the precisions that a GPU has for a GEMM."""
    found = [BF16]
    if capability >= (8, 9):
        found += TENSORWISE
    if capability == (9, 0):
        found.append(BLOCKWISE)
        # The weights are operand B. Gradients of weights have none.
        found += [WEIGHT_BLOCKS] if problem.direction != "backward_weight" else []
    if capability >= (10, 0):
        found.append(MXFP8)
    return found


def configurations(shape: Shape, micro_batch: int, capability: tuple[int, int]) -> list[tuple[Problem, Precision]]:
    return [
        (problem, precision)
        for problem in problems(shape, micro_batch)
        for precision in precisions(problem, capability)
    ]


def describe(problem: Problem, precision: Precision) -> dict[str, Any]:
    """Return the part of a row that says what was timed."""
    sizes = {name: getattr(problem, name) for name in ("linear", "direction", "m", "n", "k")}
    return {**sizes, "precision": precision.name, "output": problem.output, "beta": problem.beta}


class Operands:
    """A, B and C of a GEMM on the GPU. In fp8 both operands lie along the axis that is summed over."""

    def __init__(self, torch: Any, problem: Problem, precision: Precision, device: str) -> None:
        m, n, k = problem.m, problem.n, problem.k
        self.fp8 = precision.scaling_a is not None
        self.a_transposed = problem.a_transposed and not self.fp8
        self.b_transposed = problem.b_transposed or self.fp8

        def stored(rows: int, columns: int, transposed: bool) -> Any:
            shape = (columns, rows) if transposed else (rows, columns)
            values = torch.randn(shape, dtype=torch.bfloat16, device=device)
            return (100 * values).clamp(-448, 448).to(torch.float8_e4m3fn) if self.fp8 else values

        self.stored_a, self.stored_b = stored(m, k, self.a_transposed), stored(k, n, self.b_transposed)
        self.a = self.stored_a.t() if self.a_transposed else self.stored_a
        self.b = self.stored_b.t() if self.b_transposed else self.stored_b
        self.c = torch.zeros(m, n, dtype=torch.float32 if problem.output == "f32" else torch.bfloat16, device=device)
        self.scales_a = scales(torch, precision.scaling_a, m, k, device)
        self.scales_b = scales(torch, precision.scaling_b, n, k, device)

    def for_library(self, problem: Problem, precision: Precision) -> Gemm:
        """Return the GEMM as cuBLASLt is told about it."""

        def operand(stored: Any, transposed: bool, scaling: str | None, scales: Any) -> Operand:
            dtype = "e4m3" if self.fp8 else "bf16"
            return Operand(stored.data_ptr(), dtype, transposed, scaling, scales.data_ptr() if scaling else 0)

        a = operand(self.stored_a, self.a_transposed, precision.scaling_a, self.scales_a)
        b = operand(self.stored_b, self.b_transposed, precision.scaling_b, self.scales_b)
        sizes, c = (problem.m, problem.n, problem.k), self.c.data_ptr()
        return Gemm(*sizes, a, b, c, problem.output, problem.beta == 1, precision.fast_accumulation)


def scales(torch: Any, scaling: str | None, rows: int, k: int, device: str) -> Any:
    """Return the scales of an operand of `rows` times k elements, stored as cuBLASLt documents them; all are 1."""
    if scaling is None:
        return None
    f32 = {"dtype": torch.float32, "device": device}
    if scaling == "tensor":
        return torch.ones((), **f32)
    if scaling == "1x128":
        return torch.ones(-(-k // 128), rows, **f32).t()
    if scaling == "128x128":
        # Blocks along k, padded to a multiple of 4, lie side by side.
        return torch.ones(-(-rows // 128), -(-k // 128 // 4) * 4, **f32).t()
    # Tiles of 128 rows and 4 blocks of 32. A byte is an exponent, biased by 127.
    bytes_ = -(-rows // 128) * 128 * (-(-k // 32 // 4) * 4)
    return torch.full((bytes_,), 127, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)


def torch_launch(torch: Any, problem: Problem, precision: Precision, operands: Operands) -> Callable[[], Any]:
    """Return a function that launches the GEMM by PyTorch."""
    a, b, c = operands.a, operands.b, operands.c
    if not operands.fp8:
        if problem.output == "bf16":
            return lambda: torch.matmul(a, b, out=c)
        if problem.beta:
            return lambda: torch.addmm(c, a, b, out_dtype=torch.float32, out=c)
        return lambda: torch.mm(a, b, out_dtype=torch.float32, out=c)
    scale_a, scale_b, fast = operands.scales_a, operands.scales_b, precision.fast_accumulation
    if precision.scaling_a == "tensor" and not problem.beta:
        return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=c.dtype, use_fast_accum=fast)
    functional = torch.nn.functional
    types = functional.ScalingType
    recipe_of = {
        "tensor": types.TensorWise, "1x32": types.BlockWise1x32, "1x128": types.BlockWise1x128,
        "128x128": types.BlockWise128x128,
    }  # fmt: skip
    recipes = recipe_of[precision.scaling_a], recipe_of[precision.scaling_b]
    options = {"use_fast_accum": fast}
    if precision is MXFP8:
        options |= dict.fromkeys(("swizzle_a", "swizzle_b"), functional.SwizzleType.SWIZZLE_32_4_4)
    arguments = (a, b, scale_a, recipes[0], scale_b, recipes[1])
    if problem.beta:
        return lambda: functional.scaled_addmm_(c, *arguments, **options)
    return lambda: functional.scaled_mm(*arguments, output_dtype=c.dtype, **options)


def launch_milliseconds(torch: Any, launch: Callable[[], Any], runs: int) -> float:
    """Return the GPU's milliseconds per run of several in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / runs


Timer = Callable[[Callable[[], Any], int], float]
"""Runs a launch so many times; returns milliseconds per run."""


def sustained(timer: Timer, launch: Callable[[], Any]) -> float:
    """Return milliseconds per run over SUSTAINED_MILLISECONDS, after two runs that are not counted."""
    timer(launch, 1)
    return timer(launch, max(1, math.ceil(SUSTAINED_MILLISECONDS / max(timer(launch, 1), 1e-3))))


def brief(timer: Timer, launches: list[Callable[[], Any]]) -> list[float]:
    """Return milliseconds per run of each launch, timed again if it is near the fastest; infinity if it fails."""
    times: list[float] = []
    for launch in launches:
        try:
            timer(launch, 1)  # loads the kernel
            once = timer(launch, 1)
            times.append(min(once, timer(launch, 3)) if once < HOPELESS * min(times, default=math.inf) else once)
        except RuntimeError:
            times.append(math.inf)
    return times


def search(timer: Timer, launches: list[Callable[[], Any]]) -> dict[str, Any]:
    """Return the sustained milliseconds of the first launch, of the fastest of the first 16 and of all."""
    times = brief(timer, launches)
    if not any(map(math.isfinite, times)):
        raise RuntimeError(f"none of the {len(launches)} algorithms that the library offers runs")

    def fastest(count: int) -> int:
        return min(range(min(count, len(times))), key=times.__getitem__)

    chosen = {"first": 0, "best_of_16": fastest(FORMER_CANDIDATES), "best": fastest(CANDIDATES)}
    measured = {
        index: sustained(timer, launches[index]) for index in sorted(set(chosen.values())) if times[index] < math.inf
    }
    by_name = {f"{name}_milliseconds": measured.get(index) for name, index in chosen.items()}
    return {"candidates": len(launches), "chosen": chosen["best"], "milliseconds": measured[chosen["best"]], **by_name}


class Sweep:
    """The GPU, through PyTorch and through cuBLASLt."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"  # PyTorch has loaded it
        self.library = Library(name, self.workspace.data_ptr())
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def timer(self, launch: Callable[[], Any], runs: int) -> float:
        return launch_milliseconds(self.torch, launch, runs)

    def by_torch(self, problem: Problem, precision: Precision, operands: Operands) -> dict[str, Any]:
        return {"milliseconds": sustained(self.timer, torch_launch(self.torch, problem, precision, operands))}

    def by_library(self, problem: Problem, precision: Precision, operands: Operands) -> dict[str, Any]:
        descriptors = Descriptors(self.library, operands.for_library(problem, precision))
        algorithms = descriptors.algorithms(CANDIDATES)
        return search(self.timer, [partial(descriptors.launch, one, self.stream) for one in algorithms])

    def rows(self, listed: list[tuple[Problem, Precision]], end: float) -> Iterator[dict[str, Any]]:
        """Yield a row per GEMM and library until `end`: its milliseconds, or the reason that there are none."""
        for problem, precision in listed:
            operands = Operands(self.torch, problem, precision, "cuda")
            for name, measure in (("torch", self.by_torch), ("cublaslt", self.by_library)):
                if time.monotonic() > end:
                    return
                row = {**describe(problem, precision), "library": name, "time": time.strftime("%H:%M:%S")}
                try:
                    row |= measure(problem, precision, operands)
                    row["tflops"] = problem.flops / row["milliseconds"] / 1e9
                # An older PyTorch has fewer functions and options.
                except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                    row |= {"milliseconds": None, "problem": str(error).strip().splitlines()[0]}
                yield row


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Time the GEMMs of a config's blocks in bf16 and fp8.")
    parser.add_argument("--config", type=Path, required=True, help="a config of ours: YAML, or JSON")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per GEMM")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time budget: no GEMM is started after it")
    parser.add_argument("--dry-run", action="store_true", help="print what would be timed")
    parser.add_argument("--capability", default="9.0", help="with --dry-run: the GPU's compute capability")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    shape = read_shape(arguments.config)
    if arguments.dry_run:
        major, minor = (int(part) for part in arguments.capability.split("."))
        listed = configurations(shape, arguments.micro_batch, (major, minor))
        shapes = [asdict(problem) for problem in problems(shape, arguments.micro_batch)]
        print(json.dumps({"shapes": shapes, "configurations": [describe(*one) for one in listed]}))
        return 0
    try:
        import torch
    except ImportError as error:
        print(f"gemm_sweep.py needs PyTorch for the GPU: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gemm_sweep.py needs a GPU, and PyTorch sees none: run it where `nvidia-smi` lists one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    listed = configurations(shape, arguments.micro_batch, torch.cuda.get_device_capability())
    measured = 0
    for row in Sweep(torch).rows(listed, end):
        print(json.dumps(row), flush=True)
        measured += row["milliseconds"] is not None
    print(json.dumps({"measured": measured, "listed": 2 * len(listed)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
