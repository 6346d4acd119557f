"""The roofline of a training step of `configs/rtx5090_1b.yaml`, launch by launch: what a GPU could reach at best.

A launch takes `max(FLOPs / peak, bytes / bandwidth)`, with the peak and the bandwidth that such launches reach in
practice (`Gpu`). Bytes are what a launch must move if caches keep nothing between launches and everything within one.

    python benches/gpu/roofline.py --gpu rtx5090 --micro-batch 4 --chunk 2048

prints the tables of docs/decisions/012, in Markdown. It needs the package, for its table of GPUs, and no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from orchestrator import _native


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU and the fractions of them that launches reach; docs/decisions/012 says which are measured."""

    name: str
    flops: float
    """Nominal bf16 FLOPs per second, dense, with f32 accumulation: the denominator of MFU."""
    bytes_per_second: float
    """Nominal memory bandwidth."""
    gemm: float
    """Fraction of `flops` that large GEMMs reach."""
    attention_forward: float
    attention_backward: float
    """Fractions of `flops` for attention with heads of 64, counted as 2 and 5 GEMMs over the causal half."""
    memory: float
    """Fraction of `bytes_per_second` that streaming launches reach."""
    multiprocessors: int
    """Streaming multiprocessors (SMs)."""


def _gpu(entry: dict[str, Any]) -> Gpu:
    """Return a GPU of `plan`'s table, with its optimistic fractions."""
    high = entry["high"]
    fractions = (high["gemm"], high["attention_forward"], high["attention_backward"], high["memory"])
    return Gpu(entry["name"], entry["bf16_flops"], entry["bytes_per_second"], *fractions, entry["multiprocessors"])


GPUS = {name: _gpu(entry) for name, entry in _native.gpu_table().items()}


@dataclass(frozen=True)
class Model:
    """Sizes as in the config; `vocabulary` is `vocab_size` with the padding in memory."""

    layers: int = 20
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 8192
    vocab_size: int = 50_000
    vocabulary: int = 50_048
    sequence: int = 2048
    sequences_per_step: int = 64
    optimizer: str = "adamw"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def packed(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def block_weights(self) -> int:
        """Weights of one block that take part in a GEMM."""
        return self.hidden * (self.packed + self.hidden + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters in memory, the padding of the vocabulary included."""
        return self.layers * (self.block_weights + 2 * self.hidden) + (self.vocabulary + 1) * self.hidden

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token that MFU counts: 6 N_matmul + 6 L A T, see `ModelShape::flops_per_token`."""
        gemm_weights = self.layers * self.block_weights + self.vocab_size * self.hidden
        return 6.0 * gemm_weights + 6.0 * self.layers * self.hidden * self.sequence


@dataclass(frozen=True)
class Launch:
    """Launches of one kind: `count` of them per micro-batch, or per step where `per_step`."""

    part: str
    name: str
    count: float
    flops: float
    """FLOPs of one launch."""
    bytes: float
    """Bytes that one launch moves."""
    per_step: bool = False
    result: tuple[int, int] | None = None
    """Rows and columns of a GEMM's result."""


def gemm(name: str, part: str, m: int, n: int, k: int, count: float, out_bytes: int, accumulates: bool) -> Launch:
    """Return the launch of `[m, k] x [k, n]` in bf16. `accumulates` (beta = 1): the result is read and written."""
    moved = 2 * (m * k + k * n) + m * n * out_bytes * (2 if accumulates else 1)
    return Launch(part, name, count, 2.0 * m * n * k, moved, result=(m, n))


def linear(model: Model, name: str, tokens: int, inputs: int, outputs: int) -> Iterator[Launch]:
    """Yield a linear layer of every block: forward, gradients of the input (dX) and the weight (dW, summed in f32)."""
    yield gemm(f"{name} forward", "GEMMs", tokens, outputs, inputs, model.layers, 2, False)
    yield gemm(f"{name} dX", "GEMMs", tokens, inputs, outputs, model.layers, 2, False)
    yield gemm(f"{name} dW", "GEMMs", outputs, inputs, tokens, model.layers, 4, True)


def block(model: Model, tokens: int) -> Iterator[Launch]:
    """Yield the launches of all blocks in one micro-batch, forward and backward with selective recompute."""
    n, d, i, layers = tokens, model.hidden, model.intermediate, model.layers
    yield from linear(model, "qkv", n, d, model.packed)
    yield from linear(model, "attention output", n, d, d)
    yield from linear(model, "gate/up", n, d, 2 * i)
    yield from linear(model, "down", n, i, d)
    causal = 2.0 * n * model.sequence / 2 * d
    row, wide = 2 * n * d, 2 * n * model.packed
    yield Launch("attention", "attention forward", layers, 2 * causal, wide + row)
    yield Launch("attention", "attention backward", layers, 5 * causal, 2 * wide + 3 * row)
    rotated = 2 * n * (model.heads + model.kv_heads) * model.head_size
    pointwise = {
        "add_rms_norm forward": (2, 4 * row),
        "add_rms_norm backward": (2, 4 * row),
        "add_rms_norm normalize": (2, 2 * row),
        "rope, both ways": (2, 2 * rotated),
        "swiglu forward": (1, 2 * 3 * n * i),
        "swiglu backward, recomputing": (1, 2 * 6 * n * i),
    }
    for name, (count, moved) in pointwise.items():
        yield Launch("norm and pointwise", name, count * layers, 0.0, moved)


def head(model: Model, tokens: int, chunk: int) -> Iterator[Launch]:
    """Yield the launches of head and loss in chunks of rows: f32 logits, read twice, and their bf16 gradients."""
    d, v = model.hidden, model.vocabulary
    chunks = tokens / chunk
    part = "head and loss"
    yield gemm("head logits", part, chunk, v, d, chunks, 4, False)
    yield Launch(part, "softmax and gradient", chunks, 0.0, chunk * v * (4 + 4 + 2))
    yield gemm("head dX", part, chunk, d, v, chunks, 2, False)
    yield gemm("head dW", part, v, d, chunk, chunks, 4, True)


def adamw(weights: int) -> Launch:
    """Return AdamW's launch: reads gradient, weight, low bits and two moments; writes all but the gradient."""
    return Launch("optimizer", "AdamW", 1, 0.0, (4 + 12 + 12) * weights, per_step=True)


def muon(model: Model) -> Iterator[Launch]:
    """Yield Muon's launches for the matrices of the blocks, with 5 iterations of 3 GEMMs, and AdamW's for the rest."""
    part, d, i, layers = "optimizer", model.hidden, model.intermediate, model.layers
    matrices = layers * model.block_weights
    # Gradient and momentum are read, momentum and the bf16 update written; then the update is read for its norm, and
    # read and written to divide by it.
    yield Launch(part, "Muon momentum and norm", 1, 0.0, (4 + 8 + 2 + 2 + 4) * matrices, per_step=True)
    kv = model.kv_heads * model.head_size
    for name, rows, columns, count in [("q, o", d, d, 2), ("k, v", kv, d, 2), ("gate, up, down", i, d, 3)]:
        short, long, times = min(rows, columns), max(rows, columns), 5 * count * layers
        sizes = {"X X^T": (short, short, long), "A A": (short, short, short), "B X": (short, long, short)}
        for kind, (m, n, k) in sizes.items():
            # The polynomial's lower term is added by beta = 1.
            launch = gemm(f"Muon {name}: {kind}", part, m, n, k, times, 2, accumulates=kind != "X X^T")
            yield replace(launch, per_step=True)
    yield Launch(part, "Muon step", 1, 0.0, (2 + 4 + 4) * matrices, per_step=True)
    yield adamw(model.parameters - matrices)


def step(model: Model, micro_batch: int, chunk: int) -> list[Launch]:
    """Return the launches of a micro-batch, and of the optimizer in a step."""
    tokens, d = micro_batch * model.sequence, model.hidden
    row = 2 * tokens * d
    ends = [
        Launch("norm and pointwise", "embedding forward", 1, 0.0, 2 * row),
        Launch("norm and pointwise", "embedding backward", 1, 0.0, row + 2 * 2 * row),
        Launch("norm and pointwise", "last norm, both ways", 1, 0.0, 9 * row),
    ]
    weights = model.parameters
    optimizer = [
        Launch("optimizer", "norm of the gradients", 1, 0.0, 4 * weights, per_step=True),
        *(muon(model) if model.optimizer == "muon" else [adamw(weights)]),
        Launch("optimizer", "gradients to zero", 1, 0.0, 4 * weights, per_step=True),
    ]
    return [*block(model, tokens), *head(model, tokens, chunk), *ends, *optimizer]


def seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time of all launches of a kind in a micro-batch (or a step)."""
    peak = gpu.flops * {
        "attention forward": gpu.attention_forward,
        "attention backward": gpu.attention_backward,
    }.get(launch.name, gpu.gemm)
    return launch.count * max(launch.flops / peak, launch.bytes / (gpu.bytes_per_second * gpu.memory))


def memory_seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time that the bytes of all launches of a kind take alone."""
    return launch.count * launch.bytes / (gpu.bytes_per_second * gpu.memory)


def wave_efficiency(result: tuple[int, int], tile: tuple[int, int], multiprocessors: int) -> float:
    """Return the fraction of the multiprocessors that work, one tile at a time each, until the last wave is done."""
    (m, n), (rows, columns) = result, tile
    tiles = -(-m // rows) * -(-n // columns)
    return m * n / (-(-tiles // multiprocessors) * multiprocessors * rows * columns)


SIDES = (64, 128, 192, 256)


def best_wave_efficiency(result: tuple[int, int], multiprocessors: int) -> float:
    """Return `wave_efficiency` with the best of the usual tiles, of 128 x 64 to 256 x 128 elements."""
    tiles = [(rows, columns) for rows in SIDES for columns in SIDES if 64 * 128 <= rows * columns <= 256 * 128]
    return max(wave_efficiency(result, tile, multiprocessors) for tile in tiles)


@dataclass(frozen=True)
class Total:
    seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    mfu: float


def total(model: Model, gpu: Gpu, micro_batch: int, chunk: int, overlapped: bool = True) -> Total:
    """Return a step's times; if not `overlapped`, a GEMM moves its bytes before it computes: the pessimistic bound."""
    micro_batches = model.sequences_per_step / micro_batch
    spent = 0.0
    for launch in step(model, micro_batch, chunk):
        time = seconds(launch, gpu)
        if not overlapped and launch.flops:
            time = launch.count * launch.flops / (gpu.flops * gpu.gemm) + memory_seconds(launch, gpu)
            time = max(time, seconds(launch, gpu))
        spent += time * (1 if launch.per_step else micro_batches)
    tokens = model.sequences_per_step * model.sequence
    return Total(spent, tokens / spent, tokens * model.flops_per_token / spent / gpu.flops)


def table(model: Model, gpu: Gpu, micro_batch: int, chunk: int) -> str:
    """Return in Markdown a row per kind of launch, and the sums by part."""
    micro_batches = model.sequences_per_step / micro_batch
    whole = total(model, gpu, micro_batch, chunk)
    lines = [
        f"{gpu.name}, micro-batches of {micro_batch} x {model.sequence}, head in chunks of {chunk} rows",
        "",
        "| part | launches | per step | GFLOP each | MB each | bound by | ms per step | share |",
        "|---|---|--:|--:|--:|---|--:|--:|",
    ]
    parts: dict[str, float] = {}
    for launch in step(model, micro_batch, chunk):
        times = 1 if launch.per_step else micro_batches
        spent = seconds(launch, gpu) * times
        parts[launch.part] = parts.get(launch.part, 0.0) + spent
        bound = "memory" if spent <= memory_seconds(launch, gpu) * times * (1 + 1e-9) else "compute"
        lines.append(
            f"| {launch.part} | {launch.name} | {launch.count * times:.0f} | {launch.flops / 1e9:.1f} "
            f"| {launch.bytes / 1e6:.1f} | {bound} | {spent * 1e3:.1f} | {spent / whole.seconds:.1%} |"
        )
    lines += ["", "| part | ms per step | share |", "|---|--:|--:|"]
    lines += [f"| {part} | {spent * 1e3:.0f} | {spent / whole.seconds:.1%} |" for part, spent in parts.items()]
    lines.append(f"| **sum** | **{whole.seconds * 1e3:.0f}** | |")
    apart = total(model, gpu, micro_batch, chunk, overlapped=False)
    lines += [
        "",
        f"{whole.tokens_per_second:,.0f} tokens/s, MFU {whole.mfu:.1%}; "
        f"{apart.mfu:.1%} if no GEMM hid its own memory traffic.",
    ]
    return "\n".join(lines)


def sensitivity(model: Model, gpu: Gpu, micro_batch: int, chunk: int) -> str:
    """Return in Markdown the MFU when one assumption or choice changes."""
    roof = replace(gpu, gemm=1.0, attention_forward=1.0, attention_backward=1.0, memory=1.0)

    def attention(factor: float) -> Gpu:
        forward, backward = factor * gpu.attention_forward, factor * gpu.attention_backward
        return replace(gpu, attention_forward=forward, attention_backward=backward)

    cases = [
        ("as above", gpu, micro_batch, chunk),
        ("every launch at its roof", roof, micro_batch, chunk),
        ("GEMMs 5 points faster", replace(gpu, gemm=gpu.gemm + 0.05), micro_batch, chunk),
        ("GEMMs 5 points slower", replace(gpu, gemm=gpu.gemm - 0.05), micro_batch, chunk),
        ("attention one and a half times as fast", attention(1.5), micro_batch, chunk),
        ("attention half as fast", attention(0.5), micro_batch, chunk),
        ("memory at 80 % of its bandwidth", replace(gpu, memory=0.80), micro_batch, chunk),
        ("micro-batches of 1", gpu, 1, chunk),
        ("head in chunks of 640 rows", gpu, micro_batch, 640),
        ("head in chunks of 8192 rows", gpu, micro_batch, 8192),
    ]
    lines = ["| | MFU | if nothing overlapped |", "|---|--:|--:|"]
    for name, on, size, rows in cases:
        best, worst = (total(model, on, size, rows, overlapped=overlapped).mfu for overlapped in (True, False))
        lines.append(f"| {name} | {best:.1%} | {worst:.1%} |")
    return "\n".join(lines)


def fusions(model: Model, gpu: Gpu, micro_batch: int, chunk: int) -> str:
    """Return in Markdown the time that a step would save if fused launches moved fewer bytes."""
    whole = total(model, gpu, micro_batch, chunk)
    row, wide = 2.0 * model.hidden, 2.0 * model.intermediate
    rotated = 2.0 * (model.heads + model.kv_heads) * model.head_size
    logits = 4.0 * model.vocabulary
    saved = {
        "RoPE inside attention or the QKV GEMM": model.layers * 4 * rotated,
        "SwiGLU forward inside the gate/up GEMM": model.layers * 2 * wide,
        "norms normalized by the launch that computes their gradient": model.layers * 2 * row,
        "logits read once (kept on the chip between softmax and gradient)": logits,
        "everything above": 0.0,
    }
    saved["everything above"] = sum(saved.values())
    saved["taken already: SwiGLU recomputed by the launch of its gradient"] = model.layers * 2 * wide
    lines = ["| fused | kB per token | ms per step | of the step |", "|---|--:|--:|--:|"]
    for name, per_token in saved.items():
        tokens = model.sequences_per_step * model.sequence
        time = per_token * tokens / (gpu.bytes_per_second * gpu.memory)
        lines.append(f"| {name} | {per_token / 1e3:.0f} | {time * 1e3:.1f} | {time / whole.seconds:.2%} |")
    return "\n".join(lines)


def tiles(model: Model, gpu: Gpu, micro_batch: int, chunk: int) -> str:
    """Return in Markdown the wave quantization: how evenly the tiles of each GEMM fill the GPU."""
    lines = ["| GEMM | result | tiles of 128 x 128 | the best tile |", "|---|---|--:|--:|"]
    for launch in step(model, micro_batch, chunk):
        if launch.result:
            (m, n), multiprocessors = launch.result, gpu.multiprocessors
            usual, best = (
                wave_efficiency((m, n), (128, 128), multiprocessors),
                best_wave_efficiency((m, n), multiprocessors),
            )
            lines.append(f"| {launch.name} | {m} x {n} | {usual:.0%} | {best:.0%} |")
    return "\n".join(lines)


SECTIONS = {"table": table, "sensitivity": sensitivity, "fusions": fusions, "tiles": tiles}


def main() -> None:
    """Print the sections asked for."""
    parser = argparse.ArgumentParser(description="The roofline of a training step of configs/rtx5090_1b.yaml.")
    parser.add_argument("--gpu", choices=GPUS, default="rtx5090")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="B")
    parser.add_argument("--chunk", type=int, default=2048, metavar="ROWS", help="rows of logits per chunk")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--section", choices=SECTIONS, help="print only this section")
    arguments = parser.parse_args()
    chosen = [arguments.section] if arguments.section else list(SECTIONS)
    model, gpu = Model(optimizer=arguments.optimizer), GPUS[arguments.gpu]
    print("\n\n".join(SECTIONS[name](model, gpu, arguments.micro_batch, arguments.chunk) for name in chosen))


if __name__ == "__main__":
    main()
