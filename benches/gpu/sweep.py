"""Times attention's kernels with many tiles, compiled by the local Triton, to find candidates worth declaring.

    python benches/gpu/sweep.py                                     every kernel, heads of 64 and 128
    python benches/gpu/sweep.py --operation attention_forward --head-size 64 --documents
    python benches/gpu/sweep.py --declared --pytorch                the tiles among which the trainer chooses, and
                                                                    PyTorch's attention by FlashAttention and cuDNN

It compiles the sources in transformer_candle/kernels/triton for the local GPU and prints a JSON line per tile once it
is timed; `declared` is true for the tile that this GPU uses without timing. Attention by PyTorch is timed at the same
shape, forward and backward as a whole. A Triton release other than the one that
compiles the checked-in PTX may rank tiles differently: declare the fastest as candidates (the `Tiles` of an
operation), which the trainer then times as compiled. It needs PyTorch for the GPU, with its Triton.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "transformer_candle" / "kernels" / "triton"
SOURCES = {
    "attention_forward": "attention",
    "attention_backward_queries": "attention_backward",
    "attention_backward_keys": "attention_backward",
}
ROWS = (32, 64, 128)
WARPS = (4, 8)
STAGES = (2, 3)
WARM_UP_MILLISECONDS, MEASURED_MILLISECONDS = 25, 100


@dataclass(frozen=True)
class Problem:
    """The sizes of a call, in bf16."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    documents: bool = False

    def values(self, torch: Any, device: str) -> dict[str, Any]:
        """Return the arguments of all kernels, by name. Operands are random: GPUs multiply zeros faster."""
        tokens, width = self.batch * self.length, self.heads * self.head_size
        packed = width + 2 * self.kv_heads * self.head_size
        bf16 = {"dtype": torch.bfloat16, "device": device}
        f32 = {"dtype": torch.float32, "device": device}
        return {
            "qkv_NP": torch.randn(tokens, packed, **bf16),
            "documents_N": self._documents(torch, device),
            "out_NHE": torch.randn(tokens, width, **bf16),
            "lse_BHT": torch.zeros(self.batch, self.heads, self.length, **f32),
            "dout_NHE": torch.randn(tokens, width, **bf16),
            "dqkv_NP": torch.empty(tokens, packed, **bf16),
            "statistics_BH2T": torch.zeros(self.batch, self.heads, 2, self.length, **f32),
            "T": self.length,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_size_8": self.head_size // 8,
            "scale": self.head_size**-0.5,
        }

    def _documents(self, torch: Any, device: str) -> Any:
        """Return the position at which each token's document begins: four documents of equal length per sequence."""
        quarter = max(1, self.length // 4)
        begins = torch.arange(self.length, dtype=torch.int32, device=device) // quarter * quarter
        return begins.repeat(self.batch)

    def grid(self, operation: str, constants: dict[str, Any]) -> tuple[int, int]:
        """Return the launch grid: heads of all sequences, and tiles of positions."""
        keys = operation == "attention_backward_keys"
        tile = constants["BLOCK_L" if keys else "BLOCK_M"]
        return self.batch * (self.kv_heads if keys else self.heads), -(-self.length // tile)

    def flops(self, backward: bool) -> float:
        """Return the FLOPs of causal attention: two matmuls forward, five backward."""
        return (5 if backward else 2) * self.batch * self.heads * self.length**2 * self.head_size

    def kernel(self, operation: str) -> str:
        """Return the kernel's name in the manifest."""
        return f"{operation}.bf16.e{self.head_size}{'.documents' if self.documents else ''}"


@dataclass(frozen=True)
class Variant:
    """Tile sizes and compiler options of an operation."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    # Registers per thread at most.
    max_registers: int | None = None

    @classmethod
    def of(cls, kernel: Any) -> Variant:
        """Return the variant of a declared kernel."""
        constants = kernel.constants
        sizes = constants["BLOCK_M"], constants["BLOCK_L"], kernel.num_warps, kernel.num_stages
        return cls(*sizes, kernel.max_registers)

    def constants(self, problem: Problem) -> dict[str, Any]:
        """Return the values of the function's `tl.constexpr` parameters."""
        tiles = {"BLOCK_M": self.queries, "BLOCK_L": self.keys, "BLOCK_E": problem.head_size}
        return {"DOCUMENTS": problem.documents, "EXACT": True, **tiles}


def variants() -> Iterator[Variant]:
    """Return every combination to time."""
    return itertools.starmap(Variant, itertools.product(ROWS, ROWS, WARPS, STAGES))


def declarations(operation: str) -> list[Any]:
    """Return the kernels that the operation's source declares."""
    if str(KERNELS) not in sys.path:
        sys.path.insert(0, str(KERNELS))
    kernels: list[Any] = importlib.import_module(SOURCES[operation]).KERNELS
    return kernels


def declared(problem: Problem, operation: str, families: Sequence[str]) -> Any:
    """Return the kernel that a GPU with these families, in order of preference, uses without timing."""
    return choices(problem, operation, families)[0]


def choices(problem: Problem, operation: str, families: Sequence[str]) -> list[Any]:
    """Return the kernels among which the trainer chooses on a GPU with these families, the declared one first."""
    name = problem.kernel(operation)
    named = [one for one in declarations(operation) if one.name == name]
    family = next(family for family in families if any(one.family == family for one in named))
    return sorted((one for one in named if one.family == family), key=lambda one: one.candidate is not None)


def families(capability: tuple[int, int]) -> list[str]:
    """Return a GPU's families in order of preference, as the trainer chooses them (`kernels/src/cuda/manifest.rs`)."""
    if capability == (9, 0):
        return ["sm_90a", "sm_80"]
    if capability in ((8, 6), (8, 9)) or capability[0] >= 12:
        return ["sm_80_small", "sm_80"]
    return ["sm_80"]


def milliseconds_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the median milliseconds of a call, or the reason that there are none."""
    from triton.testing import do_bench

    try:
        timed = do_bench(call, warmup=WARM_UP_MILLISECONDS, rep=MEASURED_MILLISECONDS, return_mode="median")
    except Exception as error:  # Triton raises several types, without a common base, for what does not fit the GPU.
        return {"milliseconds": None, "problem": str(error).splitlines()[0]}
    return {"milliseconds": timed}


def rows(torch: Any, problem: Problem, operation: str, device: str, only_declared: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per variant: those among which the trainer chooses, then every other combination."""
    chosen = choices(problem, operation, families(torch.cuda.get_device_capability()))
    kernel, known = chosen[0], [Variant.of(one) for one in chosen]
    values = problem.values(torch, device)
    arguments = {name: values[name] for name in kernel.arguments}
    for variant in known if only_declared else dict.fromkeys([*known, *variants()]):
        constants = variant.constants(problem)
        launch = kernel.function[problem.grid(operation, constants)]
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
        if variant.max_registers:
            options["maxnreg"] = variant.max_registers
        row = {"kernel": problem.kernel(operation), **vars(variant), "declared": variant == known[0]}
        yield row | milliseconds_of(partial(launch, **arguments, **constants, **options))


def pytorch_rows(torch: Any, problem: Problem, device: str) -> Iterator[dict[str, Any]]:
    """Yield a row per attention kernel of PyTorch and direction."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    bf16 = {"dtype": torch.bfloat16, "device": device}

    def heads(count: int) -> Any:
        # As a model has them: [B, T, H, E] in memory.
        return torch.randn(problem.batch, problem.length, count, problem.head_size, **bf16).transpose(1, 2)

    q, k, v = (heads(count).requires_grad_() for count in (problem.heads, problem.kv_heads, problem.kv_heads))
    dout = heads(problem.heads)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            for backward in (False, True):
                direction = "backward" if backward else "forward"
                row = {"kernel": f"pytorch {name} {direction}", "head_size": problem.head_size}
                try:
                    out = attend()
                except RuntimeError as error:
                    yield row | {"milliseconds": None, "problem": str(error).splitlines()[0]}
                    continue
                gradients = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
                timed = milliseconds_of(gradients if backward else attend)
                if timed["milliseconds"]:
                    timed["tflops"] = problem.flops(backward) / timed["milliseconds"] / 1e9
                yield row | timed


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Time attention's kernels with many tiles.")
    parser.add_argument("--operation", choices=SOURCES, action="append", help="repeatable; default: all")
    parser.add_argument("--head-size", type=int, choices=(64, 128), action="append", help="repeatable; default: both")
    parser.add_argument("--documents", action="store_true", help="the kernels for packed documents")
    parser.add_argument("--declared", action="store_true", help="only the tiles that the sources declare")
    parser.add_argument("--pytorch", action="store_true", help="also PyTorch's attention, by FlashAttention and cuDNN")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time budget: nothing is timed after it")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"sweep.py needs PyTorch for the GPU, with its Triton: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("sweep.py needs a GPU, and PyTorch sees none: run it where `nvidia-smi` lists one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    problem = Problem(arguments.batch, arguments.length, arguments.heads, arguments.kv_heads, 64, arguments.documents)
    problems = [replace(problem, head_size=size) for size in arguments.head_size or (64, 128)]
    operations = arguments.operation or SOURCES
    peers = [pytorch_rows(torch, one, "cuda") for one in problems if arguments.pytorch]
    ours = [rows(torch, one, name, "cuda", arguments.declared) for name in operations for one in problems]
    for row in itertools.chain(*peers, *ours):
        print(json.dumps(row), flush=True)
        if time.monotonic() > end:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
