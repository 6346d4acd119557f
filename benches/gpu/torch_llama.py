"""Baseline: the same model in PyTorch, tuned, on one GPU. Prints a JSON line per micro-batch size, then the result.

Shape, tokens per optimizer step and FLOP count are those of `transformer-candle bench` with the same config. Weights
and activations are bf16, attention is SDPA's FlashAttention, gradients accumulate in f32, and fused AdamW updates f32
master weights. The micro-batch is the fastest that fits in --memory-limit. Without a GPU it runs on the CPU, to be
tested there, unless --device cuda is given.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""A target that is not trained on, such as that of the last token of the data."""
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# What `transformer-candle plan` subtracts from the memory of a GPU: 2 % for fragmentation, and bytes for the CUDA
# context and libraries.
USABLE_FRACTION, CONTEXT_BYTES = 0.98, 600_000_000


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_embeddings: bool
    rope_theta: float
    norm_epsilon: float
    sequence_length: int
    sequences_per_step: int

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def flops_per_token(self) -> float:
        """Return 6 per weight that takes part in a matmul and 6 L A T for causal attention, forward and backward."""
        packed = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_size
        block = (packed + self.hidden_size + 3 * self.intermediate_size) * self.hidden_size
        matmul_weights = self.num_layers * block + self.vocab_size * self.hidden_size
        return 6.0 * matmul_weights + 6.0 * self.num_layers * self.hidden_size * self.sequence_length


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_size
        self.widths = [heads * size for heads in (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)]
        self.head_size = size
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=shape.norm_epsilon) for _ in range(2))
        self.qkv = nn.Linear(hidden, sum(self.widths), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed = self.qkv(self.norms[0](x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in packed)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, as Hugging Face's Llama does."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Llama(nn.Module):
    def __init__(self, shape: Shape, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
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
    ) -> None:
        self.shape, self.device = shape, device
        self.kernel = (lambda: sdpa_kernel(ATTENTION[attention])) if device.type == "cuda" else nullcontext
        torch.manual_seed(0)
        with device:
            model = Llama(shape, recompute)
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        model = self.module = model.to(dtype)
        self.weights = list(model.parameters())
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

    def accumulate(self, micro_batch: int, count: int) -> Tensor:
        """Run forward and backward of `count` micro-batches; return their loss over the targets of a whole step."""
        total = torch.zeros((), device=self.device)
        targets = (self.tokens[1] != IGNORED).sum()
        with self.kernel():
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


def accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a bf16 gradient, once computed, to its master weight's f32 gradient and frees it."""

    def add(weight: Tensor) -> None:
        assert master.grad is not None
        master.grad.add_(weight.grad)
        weight.grad = None

    return add


def seconds_per_sequence(trainer: Trainer, micro_batch: int) -> float | None:
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


def choose_micro_batch(trainer: Trainer, sizes: str) -> int:
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
        sys.exit(f"no micro-batch of {sizes} that divides {sequences} sequences fits in the memory limit")
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


def measure(trainer: Trainer, micro_batch: int, steps: int, end: float, peak: float | None) -> dict[str, Any]:
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


def read_shape(path: Path) -> Shape:
    """Return the shape of a config in YAML or JSON."""
    text = path.read_text(encoding="utf-8")
    config = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    if "vocab_size" not in config["model"]:
        sys.exit(f"{path} leaves model.vocab_size to the tokenizer, which is not read here: set it")
    return shape_of(config["model"], config["data"])


def shape_of(model: dict[str, Any], data: dict[str, Any]) -> Shape:
    fields = {name: model[name] for name in Shape.__dataclass_fields__ if name in model}
    defaults = {"tie_embeddings": True, "rope_theta": 1e4, "norm_epsilon": 1e-5}
    sequences = data.get("sequences_per_step") or data["batch_size"] * data["gradient_accumulation_steps"]
    return Shape(**{**defaults, **fields}, sequence_length=data["sequence_length"], sequences_per_step=sequences)


def read_yaml(text: str) -> dict[str, Any]:
    """Return the values of a config: by PyYAML if installed, else as `key: value` lines nested by indentation."""
    try:
        import yaml
    except ImportError:
        return plain_yaml(text)
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def plain_yaml(text: str) -> dict[str, Any]:
    root: dict[str, Any] = {}
    open_levels = [(-1, root)]
    for line in text.splitlines():
        content = line.split("#", 1)[0].rstrip()
        if not content:
            continue
        indent = len(content) - len(content.lstrip())
        key, _, value = content.strip().partition(":")
        while open_levels[-1][0] >= indent:
            open_levels.pop()
        into = open_levels[-1][1]
        into[key] = scalar(value.strip()) if value.strip() else {}
        if not value.strip():
            open_levels.append((indent, into[key]))
    return root


def scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None}.get(text, text)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a config of ours: YAML, or JSON")
    parser.add_argument("--mode", choices=("eager", "compile"), default="compile")
    parser.add_argument(
        "--memory-limit", default="none", metavar="[32122MiB|none]", help="memory of the GPU to simulate"
    )
    parser.add_argument("--device", choices=("auto", "cuda"), default="auto", help="cuda: do not fall back to the CPU")
    parser.add_argument(
        "--micro-batch", default="auto", metavar="[auto|N,N...]",
        help="the fastest that fits, or the first of a list that fits; torch.compile takes a minute per size tried",
    )  # fmt: skip
    parser.add_argument("--recompute", choices=("none", "block"), default="none")
    parser.add_argument("--attention", choices=sorted(ATTENTION), default="flash")
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

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.device == "cuda" and device.type != "cuda":
        print(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device", file=sys.stderr)
        sys.exit(2)
    usable = limit_memory(arguments.memory_limit, device)
    shape = read_shape(arguments.config)
    compiled = arguments.mode == "compile"
    trainer = Trainer(shape, device, compiled, arguments.recompute == "block", arguments.attention)
    # Allocates the moments before memory is probed.
    trainer.optimizer.step()
    micro_batch = choose_micro_batch(trainer, arguments.micro_batch)
    result = {
        "contender": f"torch-{arguments.mode}",
        "memory_limit": arguments.memory_limit,
        "usable_bytes": usable,
        "recompute": arguments.recompute,
        **measure(trainer, micro_batch, arguments.steps, end, arguments.peak),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "shape": asdict(shape),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
