"""Times attention's kernels with many tiles, compiled by the local Triton, to find candidates worth declaring.

    python benches/gpu/sweep.py                                     every kernel, heads of 64 and 128
    python benches/gpu/sweep.py --operation attention_forward --head-size 64 --documents

It compiles the sources in transformer_candle/kernels/triton for the local GPU and prints a JSON line per tile once it
is timed; `declared` is true for the tile that this GPU uses without timing. A Triton release other than the one that
compiles the checked-in PTX may rank tiles differently: declare the fastest as candidates (`attention_forward`'s and
`attention_backward_keys`' `Tiles`), which the trainer then times as compiled. It needs PyTorch for the GPU, with its
Triton.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    name = problem.kernel(operation)
    by_family = {one.family: one for one in declarations(operation) if one.name == name and not one.candidate}
    return next(by_family[family] for family in families if family in by_family)


def families(capability: tuple[int, int]) -> list[str]:
    """Return a GPU's families in order of preference, as the trainer chooses them (`kernels/src/cuda/manifest.rs`)."""
    if capability == (9, 0):
        return ["sm_90a", "sm_80"]
    if capability in ((8, 6), (8, 9)) or capability[0] >= 12:
        return ["sm_80_small", "sm_80"]
    return ["sm_80"]


def rows(torch: Any, problem: Problem, operation: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield a row per variant: its milliseconds, or the reason that there are none."""
    from triton.testing import do_bench

    kernel = declared(problem, operation, families(torch.cuda.get_device_capability()))
    declared_variant = Variant(
        kernel.constants["BLOCK_M"], kernel.constants["BLOCK_L"], kernel.num_warps, kernel.num_stages
    )
    values = problem.values(torch, device)
    arguments = {name: values[name] for name in kernel.arguments}
    for variant in variants():
        constants = variant.constants(problem)
        launch = kernel.function[problem.grid(operation, constants)]
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
        if variant == declared_variant and kernel.max_registers:
            options["maxnreg"] = kernel.max_registers
        row = {"kernel": problem.kernel(operation), **vars(variant), "declared": variant == declared_variant}
        try:
            milliseconds = do_bench(
                lambda launch=launch, constants=constants, options=options: launch(**arguments, **constants, **options),
                warmup=WARM_UP_MILLISECONDS,
                rep=MEASURED_MILLISECONDS,
                return_mode="median",
            )
        except Exception as error:  # Triton raises several types, without a common base, for what does not fit the GPU.
            yield row | {"milliseconds": None, "problem": str(error).splitlines()[0]}
        else:
            yield row | {"milliseconds": milliseconds}


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Time attention's kernels with many tiles.")
    parser.add_argument("--operation", choices=SOURCES, action="append", help="repeatable; default: all")
    parser.add_argument("--head-size", type=int, choices=(64, 128), action="append", help="repeatable; default: both")
    parser.add_argument("--documents", action="store_true", help="the kernels for packed documents")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    arguments = parser.parse_args()
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
    sizes = (arguments.batch, arguments.length, arguments.heads, arguments.kv_heads)
    for operation in arguments.operation or SOURCES:
        for head_size in arguments.head_size or (64, 128):
            problem = Problem(*sizes, head_size, arguments.documents)
            for row in rows(torch, problem, operation, "cuda"):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
