"""A Llama-style training step in plain PyTorch, as someone would write it: prints one JSON line.

The same shape, tokens per step, optimizer and clipping as `transformer-candle bench` on the same config.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch import nn

MODES = ("eager", "compile", "compile-autocast-bf16", "compile-bf16-weights")


class Block(nn.Module):
    def __init__(self, model: dict[str, int]) -> None:
        super().__init__()
        hidden, inner = model["hidden_size"], model["intermediate_size"]
        self.heads, self.kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        self.head_size = hidden // self.heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        widths = (hidden, self.kv_heads * self.head_size, self.kv_heads * self.head_size)
        self.qkv = nn.ModuleList(nn.Linear(hidden, width, bias=False) for width in widths)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in self.qkv)
        q, k = (rotated(heads, cos, sin).to(v.dtype) for heads in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Llama(nn.Module):
    def __init__(self, model: dict[str, int], length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model["vocab_size"], model["hidden_size"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["num_layers"]))
        self.norm = nn.RMSNorm(model["hidden_size"], eps=1e-5)
        self.head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)
        size = self.blocks[0].head_size
        angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def median_seconds(step: Callable[[], None], warmup: int, steps: int) -> float:
    """Return the median time of a step, after some that are not measured."""
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text())
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    length, sequences = config["data"]["sequence_length"], config["data"]["batch_size"]
    model: nn.Module = Llama(config["model"], length)
    if arguments.mode == "compile-bf16-weights":
        model = model.bfloat16()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = model if arguments.mode == "eager" else torch.compile(model)
    autocast = torch.autocast("cpu", torch.bfloat16) if "autocast" in arguments.mode else nullcontext()
    tokens = torch.randint(0, config["model"]["vocab_size"], (2, sequences, length))

    def step() -> None:
        with autocast:
            loss = forward(tokens[0], tokens[1])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    median = median_seconds(step, 3, arguments.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    speed = sequences * length / median
    print(json.dumps({"tokens_per_second": speed, "peak_mebibytes": peak}))


if __name__ == "__main__":
    main()
