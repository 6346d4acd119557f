"""The operations of a training step one by one in PyTorch: prints one JSON line per row.

Sizes, and the rows' names, as in `transformer_candle/kernels/benches/operations`. What torch.compile fuses is timed
compiled as well. With bf16 the optimizer has f32 masters and moments, as under autocast: that is what ours keeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from peer import rotated

CALLS = 3
"""The smallest number of timed calls of a row, however long they take."""
Call = Callable[[], object]
Row = tuple[str, str, Call]
"""The operation's name, whether it is eager or compiled, and a call of it."""


def linear_maps(model: dict[str, int], tokens: int) -> Iterator[Row]:
    for name, outputs, inputs in shapes(model):
        x, w, y = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
        dw, dx = torch.empty_like(w), torch.empty_like(x)
        yield f"{name}: forward", "eager", partial(torch.mm, x, w.t(), out=y)
        yield f"{name}: weight's gradient", "eager", partial(torch.mm, y.t(), x, out=dw)
        yield f"{name}: input's gradient", "eager", partial(torch.mm, y, w, out=dx)


def shapes(model: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return name, outputs and inputs of a block's linear maps, joined as in the kernels (QKV, gate and up)."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    packed = hidden + 2 * model["num_key_value_heads"] * (hidden // model["num_attention_heads"])
    return [
        ("qkv", packed, hidden),
        ("attention output", hidden, hidden),
        ("gate and up", 2 * inner, hidden),
        ("down", hidden, inner),
    ]


def decode(model: dict[str, int], _tokens: int) -> Iterator[Row]:
    maps = [shape[1:] for shape in shapes(model)] * model["num_layers"]
    weights = [torch.randn(shape) for shape in [*maps, (model["vocab_size"], model["hidden_size"])]]
    gemvs = [(torch.randn(1, weight.shape[1]), weight) for weight in weights]

    def call() -> None:
        for x, weight in gemvs:
            F.linear(x, weight)

    yield "decode: GEMVs per token", "eager", call


def attention(model: dict[str, int], tokens: int, length: int) -> Iterator[Row]:
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    size = model["hidden_size"] // heads
    inputs = [torch.randn(tokens // length, count, length, size) for count in (heads, kv_heads, kv_heads)]
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    yield "attention: forward", "eager", partial(attend, *inputs)
    yield "attention: both", "eager", forward_and_backward(attend, *inputs)


def norm(model: dict[str, int], tokens: int) -> Iterator[Row]:
    hidden = model["hidden_size"]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (hidden,), weight, 1e-5)

    def added(x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + branch
        return total, normed(total, weight)

    x, branch, weight = torch.randn(tokens, hidden), torch.randn(tokens, hidden), torch.randn(hidden)
    yield from fused("add, rms norm: both", added, x, branch, weight)
    yield "rms norm: again", "eager", partial(normed, x, weight)
    yield "rms norm: again", "compile", partial(torch.compile(normed), x, weight)


def head_norm(model: dict[str, int], tokens: int) -> Iterator[Row]:
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    size = model["hidden_size"] // heads

    def normed(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, values = x.view(tokens, -1, size).split((heads, kv_heads, kv_heads), 1)
        return F.rms_norm(q, (size,), query, 1e-5), F.rms_norm(k, (size,), key, 1e-5), values

    packed = torch.randn(tokens, (heads + 2 * kv_heads) * size)
    yield from fused("qkv bias: both", lambda x, bias: x + bias, packed, torch.randn(packed.shape[1]))
    yield from fused("qk norm: both", normed, packed, torch.randn(size), torch.randn(size))


def rope(model: dict[str, int], tokens: int, length: int) -> Iterator[Row]:
    heads = model["num_attention_heads"]
    size = model["hidden_size"] // heads
    cos, sin = torch.randn(length, size // 2), torch.randn(length, size // 2)
    queries_and_keys = torch.randn(tokens // length, heads + model["num_key_value_heads"], length, size)
    yield from fused("rope: both", lambda x: rotated(x, cos, sin), queries_and_keys)


def swiglu(model: dict[str, int], tokens: int) -> Iterator[Row]:
    gate, up = (torch.randn(tokens, model["intermediate_size"]) for _ in range(2))
    yield from fused("swiglu: both", lambda gate, up: F.silu(gate) * up, gate, up)


def embedding(model: dict[str, int], tokens: int) -> Iterator[Row]:
    ids = torch.randint(model["vocab_size"], (tokens,))
    table = torch.randn(model["vocab_size"], model["hidden_size"])
    yield "embedding: both", "eager", forward_and_backward(lambda table: F.embedding(ids, table), table)


def head(model: dict[str, int], tokens: int) -> Iterator[Row]:
    targets = torch.randint(model["vocab_size"], (tokens,))

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    hidden, weight = torch.randn(tokens, model["hidden_size"]), torch.randn(model["vocab_size"], model["hidden_size"])
    yield from fused("head, cross-entropy: both", loss, hidden, weight)


def optimizer(model: dict[str, int], _tokens: int) -> Iterator[Row]:
    hidden, layers = model["hidden_size"], model["num_layers"]
    block = sum(outputs * inputs for _, outputs, inputs in shapes(model)) + 2 * hidden
    parameters = layers * block + (2 * model["vocab_size"] + 1) * hidden
    weights = torch.zeros(parameters, dtype=torch.float32, requires_grad=True)
    weights.grad = torch.randn(parameters, dtype=torch.float32)
    adamw = torch.optim.AdamW([weights], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def call() -> None:
        torch.nn.utils.clip_grad_norm_([weights], 1.0)
        adamw.step()

    yield "clip, AdamW", "eager", call


def fused(name: str, function: Callable[..., Any], *inputs: torch.Tensor) -> Iterator[Row]:
    """Yield the rows of a function's forward and backward pass, eager and compiled."""
    yield name, "eager", forward_and_backward(function, *inputs)
    yield name, "compile", forward_and_backward(torch.compile(function, dynamic=False), *inputs)


def forward_and_backward(function: Callable[..., Any], *inputs: torch.Tensor) -> Call:
    """Return a call of a function's forward and backward pass, which allocates the gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    results = function(*leaves)
    gradients = [torch.randn_like(result) for result in (results if isinstance(results, tuple) else (results,))]

    def call() -> None:
        torch.autograd.grad(function(*leaves), leaves, gradients)

    return call


def times(call: Call, seconds: float) -> list[float]:
    """Return the times of the calls that fit into `seconds`, at least `CALLS`, after two warm-up calls."""
    call()
    call()
    durations: list[float] = []
    begin = time.perf_counter()
    while len(durations) < CALLS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="that a row is measured for")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text())
    model, length = config["model"], config["data"]["sequence_length"]
    tokens = length * config["data"]["batch_size"]
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    groups = (
        linear_maps,
        decode,
        partial(attention, length=length),
        norm,
        head_norm,
        partial(rope, length=length),
        swiglu,
        embedding,
        head,
        optimizer,
    )
    for name, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items():
        torch.set_default_dtype(dtype)
        for group in groups:
            for operation, variant, call in group(model, tokens):
                durations = times(call, arguments.seconds)
                milliseconds = {
                    "milliseconds": 1e3 * statistics.median(durations),
                    "best_milliseconds": 1e3 * min(durations),
                }
                row = {"operation": operation, "dtype": name, "variant": variant, **milliseconds}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
