"""Baseline: the same model in PyTorch, tuned, on one GPU. Prints a JSON line per micro-batch size, then the result.

Shape, tokens per optimizer step and FLOP count are those of `transformer-candle bench` with the same config. Weights
and activations are bf16, attention is SDPA's FlashAttention or cuDNN's, gradients accumulate in f32, and fused AdamW
updates f32 master weights. With --fp8 the GEMMs of the blocks multiply fp8 operands (torch_fp8.py). The micro-batch is
the fastest that fits in --memory-limit. Without a GPU it runs on the CPU, to be tested there, unless --device cuda is
given.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from llama_shape import Shape, read_shape
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch_fp8 import Fp8Linear

IGNORED = -100
"""A target that is not trained on, such as that of the last token of the data."""
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# What `transformer-candle plan` subtracts from the memory of a GPU: 2 % for fragmentation, and bytes for the CUDA
# context and libraries.
USABLE_FRACTION, CONTEXT_BYTES = 0.98, 600_000_000


class Block(nn.Module):
    def __init__(self, shape: Shape, backend: SDPBackend | None, fp8: bool) -> None:
        super().__init__()
        linear = Fp8Linear if fp8 else nn.Linear
        hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_size
        self.widths = [heads * size for heads in (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)]
        self.head_size, self.backend = size, backend
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=shape.norm_epsilon) for _ in range(2))
        self.qkv = linear(hidden, sum(self.widths), bias=False)
        self.out = linear(hidden, hidden, bias=False)
        self.gate_up = linear(hidden, 2 * inner, bias=False)
        self.down = linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed = self.qkv(self.norms[0](x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in packed)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention by the chosen kernel; with None, PyTorch chooses.

        The choice is made here because compiled code is cached by what is seen here.
        """
        if self.backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, as Hugging Face's Llama does."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Llama(nn.Module):
    def __init__(self, shape: Shape, recompute: bool, backend: SDPBackend | None, fp8: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape, backend, fp8) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
        angles = torch.outer(torch.arange(shape.sequence_length), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses over all targets."""
        x = self.embedding(inputs)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


class Trainer:
    """A bf16 model with f32 master weights and gradients."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        compiled: bool,
        recompute: bool,
        attention: str,
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
    ) -> None:
        self.shape, self.device = shape, device
        backend = ATTENTION[attention] if device.type == "cuda" else None
        torch.manual_seed(0)
        with device:
            model = Llama(shape, recompute, backend, fp8)
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        model = self.module = model.to(dtype)
        self.weights: list[nn.Parameter] = list(model.parameters())
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(accumulate_into(master))
        # As in our trainer: only matrices decay, except the embedding (and so a tied head).
        named_masters = list(zip(self.names, self.masters, strict=True))
        decayed = [master for name, master in named_masters if master.dim() == 2 and not name.startswith("embedding")]
        others = [master for name, master in named_masters if master.dim() != 2 or name.startswith("embedding")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.model: Callable[[Tensor, Tensor], Tensor] = torch.compile(model, dynamic=False) if compiled else model
        generator = torch.Generator().manual_seed(1)
        size = (2, shape.sequences_per_step, shape.sequence_length)
        self.tokens = torch.randint(0, shape.vocab_size, size, generator=generator).to(device)

    def compile_blocks(self) -> None:
        """Compile a block, which all share, and the loss: seconds where the whole model takes a minute.

        What a block adds to the residual stream is then not fused with the norm of the next block.
        """
        for block in self.module.blocks:
            block.compile(dynamic=False)
        self.module.loss = torch.compile(self.module.loss, dynamic=False)

    def accumulate(self, micro_batch: int, count: int) -> Tensor:
        """Run forward and backward of `count` micro-batches; return their loss over the targets of a whole step."""
        total = torch.zeros((), device=self.device)
        targets = (self.tokens[1] != IGNORED).sum()
        for number in range(count):
            rows = slice(number * micro_batch, (number + 1) * micro_batch)
            loss = self.model(self.tokens[0, rows], self.tokens[1, rows]) / targets
            loss.backward()
            total += loss.detach()
        return total

    def step(self, micro_batch: int) -> tuple[float, float]:
        """Take an optimizer step; return the mean loss and the gradient norm before the update."""
        loss = self.accumulate(micro_batch, self.shape.sequences_per_step // micro_batch)
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        return loss.item(), norm.item()

    def zero_grad(self) -> None:
        """Set the f32 gradients to zero."""
        torch._foreach_zero_([master.grad for master in self.masters])

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Set the weights by their names."""
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            master.copy_(values[name])
            weight.copy_(master)


class Contender(Protocol):
    """What is measured: a trainer of a model and its sizes."""

    shape: Shape
    device: torch.device
    weights: list[nn.Parameter]

    def accumulate(self, micro_batch: int, count: int) -> Tensor: ...
    def step(self, micro_batch: int) -> tuple[float, float]: ...
    def zero_grad(self) -> None: ...


def accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a bf16 gradient, once computed, to its master weight's f32 gradient and frees it."""

    def add(weight: Tensor) -> None:
        assert master.grad is not None
        master.grad.add_(weight.grad)
        weight.grad = None

    return add


def seconds_per_sequence(trainer: Contender, micro_batch: int) -> float | None:
    """Return the seconds of forward and backward per sequence; None if they run out of memory."""
    count = min(2, trainer.shape.sequences_per_step // micro_batch)
    try:
        trainer.accumulate(micro_batch, count)
        with timed(trainer.device) as seconds:
            trainer.accumulate(micro_batch, count)
        return seconds[0] / (micro_batch * count)
    except torch.OutOfMemoryError:
        return None
    finally:
        for weight in trainer.weights:
            weight.grad = None
        trainer.zero_grad()
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()


def choose_micro_batch(trainer: Contender, sizes: str) -> int:
    """Return the fastest power of two that fits (auto), or the first that fits of a list."""
    sequences = trainer.shape.sequences_per_step
    powers = [1 << power for power in range(int(math.log2(sequences)) + 1)]
    candidates = powers if sizes == "auto" else [int(size) for size in sizes.split(",")]
    seconds_of: dict[int, float] = {}
    for micro_batch in candidates:
        if sequences % micro_batch:
            continue
        seconds = seconds_per_sequence(trainer, micro_batch)
        print(json.dumps({"micro_batch": micro_batch, "seconds_per_sequence": seconds}), flush=True)
        if seconds is not None:
            seconds_of[micro_batch] = seconds
        if (seconds is None) == (sizes == "auto"):
            break
    if not seconds_of:
        raise RuntimeError(f"no micro-batch of {sizes} that divides {sequences} sequences fits in the memory limit")
    return min(seconds_of, key=lambda micro_batch: seconds_of[micro_batch])


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Measure the seconds that the block takes, including the work that it launched on the GPU."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: list[float] = []
    synchronize()
    begin = time.perf_counter()
    yield seconds
    synchronize()
    seconds.append(time.perf_counter() - begin)


def measure(trainer: Contender, micro_batch: int, steps: int, end: float, peak: float | None) -> dict[str, Any]:
    """Return means over at most `steps` optimizer steps after one warm-up step.

    At least one step is measured, further ones only if they should end before `end`.
    """
    device, shape = trainer.device, trainer.shape
    first = trainer.step(micro_batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_count, begin = 0, time.monotonic()
    with timed(device) as seconds:
        # Reading the loss in `step` synchronizes, so the host's clock measures the GPU's steps.
        while step_count < steps and (
            step_count == 0 or time.monotonic() + (time.monotonic() - begin) / step_count <= end
        ):
            last = trainer.step(micro_batch)
            step_count += 1
    speed = step_count * shape.sequences_per_step * shape.sequence_length / seconds[0]
    flops = speed * shape.flops_per_token()
    return {
        "steps": step_count,
        "tokens_per_second": speed,
        "model_flops_per_second": flops,
        "mfu": flops / peak if peak else None,
        "flops_per_token": shape.flops_per_token(),
        "micro_batch": micro_batch,
        "tokens_per_step": shape.sequences_per_step * shape.sequence_length,
        "peak_memory_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "first_step": dict(zip(("loss", "grad_norm"), first, strict=True)),
        "last_step": dict(zip(("loss", "grad_norm"), last, strict=True)),
    }


def open_device(requested: str) -> torch.device:
    """Return the GPU, or the CPU where there is none; leave with exit code 2 if one is required."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and device.type != "cuda":
        print(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device", file=sys.stderr)
        sys.exit(2)
    return device


def limit_memory(text: str, device: torch.device) -> int | None:
    """Limit PyTorch's allocator to what `transformer-candle plan` would use on a GPU of this size; return the bytes."""
    if text == "none" or device.type != "cuda":
        return None
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "GB": 10**9}
    unit = next((unit for unit in units if text.endswith(unit)), None)
    size = int(text.removesuffix(unit)) * units[unit] if unit else int(text)
    usable = int(USABLE_FRACTION * size) - CONTEXT_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, usable / torch.cuda.mem_get_info(index)[1]), index)
    return usable


def contender(arguments: argparse.Namespace, device: torch.device, attention: str, end: float) -> dict[str, Any]:
    """Train with one attention kernel, and return the result; its `failure` if it does not run."""
    mode, recompute = arguments.mode, arguments.recompute
    row = {"contender": f"torch-{mode}", "attention": attention, "fp8": arguments.fp8, "recompute": recompute}
    shape = read_shape(arguments.config)
    try:
        trainer = Trainer(shape, device, mode == "compile", recompute == "block", attention, fp8=arguments.fp8)
        if mode == "compile-blocks":
            trainer.compile_blocks()
        # Allocates the moments before memory is probed.
        trainer.optimizer.step()
        micro_batch = choose_micro_batch(trainer, arguments.micro_batch)
        row |= measure(trainer, micro_batch, arguments.steps, end, arguments.peak)
    except RuntimeError as error:
        traceback.print_exc()
        row["failure"] = str(error).strip().split("\n")[0]
    return {
        **row,
        "memory_limit": arguments.memory_limit,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "shape": asdict(shape),
    }


def forget(device: torch.device) -> None:
    """Free the model and the compiled code of a contender, before the next one."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a config of ours: YAML, or JSON")
    parser.add_argument(
        "--mode", choices=("eager", "compile", "compile-blocks"), default="compile",
        help="compile: the model as a whole; compile-blocks: a block and the loss",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", default="none", metavar="[32122MiB|none]", help="memory of the GPU to simulate"
    )
    parser.add_argument("--device", choices=("auto", "cuda"), default="auto", help="cuda: do not fall back to the CPU")
    parser.add_argument(
        "--micro-batch", default="auto", metavar="[auto|N,N...]",
        help="the fastest that fits, or the first of a list that fits; torch.compile takes a minute per size tried",
    )  # fmt: skip
    parser.add_argument("--recompute", choices=("none", "block"), default="none")
    parser.add_argument("--fp8", action="store_true", help="multiply fp8 operands in the blocks: torch_fp8.py")
    parser.add_argument(
        "--attention", choices=(*sorted(ATTENTION), "both"), default="flash",
        help="both: one after the other, a result for each, so that the faster counts",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="time budget: no step is started that would exceed it, but at least one is measured",
    )
    parser.add_argument(
        "--peak", type=float, metavar="FLOPS", help="denominator of MFU: `nominal_flops_per_second` of our bench"
    )
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds

    device = open_device(arguments.device)
    usable = limit_memory(arguments.memory_limit, device)
    kernels = sorted(ATTENTION) if arguments.attention == "both" else [arguments.attention]
    results = []
    for number, attention in enumerate(kernels):
        now = time.monotonic()
        results.append(contender(arguments, device, attention, now + (end - now) / (len(kernels) - number)))
        print(json.dumps({**results[-1], "usable_bytes": usable}), flush=True)
        forget(device)
    if all("failure" in result for result in results):
        sys.exit(results[-1]["failure"])


if __name__ == "__main__":
    main()
