"""Baseline: LoRA with peft and transformers on one GPU. Prints a JSON line per micro-batch size, then the result.

The model of a `config.json` with random bf16 weights, adapters of peft on every linear layer of the blocks, SDPA,
fused AdamW, compiled as a whole unless --mode is eager. Rank, sequence length and tokens per step are those of a config
of ours. The micro-batch is the fastest that fits in --memory-limit. Without a GPU it runs on the CPU, to be tested
there, unless --device cuda is given.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama_shape import Shape, read_yaml, shape_of
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch_llama import choose_micro_batch, limit_memory, measure, open_device
from transformers import AutoConfig, AutoModelForCausalLM

NAMES = {
    "num_layers": "num_hidden_layers",
    "tie_embeddings": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
"""Keys of `config.json` that have other names in our configs."""


def read_lora_shape(model: Path, config: Path) -> Shape:
    """Return the sizes of the model in `config.json` and of the optimizer step of a config of ours."""
    sizes = json.loads((model / "config.json").read_text())
    fields = {
        name: sizes[NAMES.get(name, name)] for name in Shape.__dataclass_fields__ if NAMES.get(name, name) in sizes
    }
    return shape_of(fields, read_yaml(config.read_text())["data"])


class LoraTrainer:
    """Adapters beside a frozen bf16 model, with what `torch_llama.measure` needs of a trainer."""

    def __init__(self, model: Path, shape: Shape, rank: int, device: torch.device, mode: str, recompute: bool) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        with device:
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
        if recompute:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.config.use_cache = False
        tuned = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        self.weights = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        compiled = torch.compile(tuned, dynamic=False) if mode == "compile" else tuned
        self.model: Callable[..., Any] = compiled
        generator = torch.Generator().manual_seed(1)
        size = (2, shape.sequences_per_step, shape.sequence_length)
        self.tokens = torch.randint(0, shape.vocab_size, size, generator=generator).to(device)

    def accumulate(self, micro_batch: int, count: int) -> Tensor:
        """Run forward and backward of `count` micro-batches; return their loss over the targets of a whole step."""
        total = torch.zeros((), device=self.device)
        for number in range(count):
            rows = slice(number * micro_batch, (number + 1) * micro_batch)
            logits = self.model(input_ids=self.tokens[0, rows]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[1, rows].flatten(), reduction="sum")
            loss = loss / self.tokens[1].numel()
            loss.backward()
            total += loss.detach()
        return total

    def step(self, micro_batch: int) -> tuple[float, float]:
        """Take an optimizer step; return the mean loss and the gradient norm before the update."""
        loss = self.accumulate(micro_batch, self.shape.sequences_per_step // micro_batch)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.zero_grad()
        return loss.item(), norm.item()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a `config.json`")
    parser.add_argument("--config", type=Path, required=True, help="a config of ours: rank, sequences of a step")
    parser.add_argument("--mode", choices=("eager", "compile"), default="compile")
    parser.add_argument("--memory-limit", default="none", metavar="[32122MiB|none]")
    parser.add_argument("--device", choices=("auto", "cuda"), default="auto", help="cuda: do not fall back to the CPU")
    parser.add_argument("--micro-batch", default="auto", metavar="[auto|N,N...]")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing, as transformers has it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    device = open_device(arguments.device)
    limit_memory(arguments.memory_limit, device)
    rank = read_yaml(arguments.config.read_text())["lora"]["rank"]
    shape = read_lora_shape(arguments.model, arguments.config)
    trainer = LoraTrainer(arguments.model, shape, rank, device, arguments.mode, arguments.recompute)
    micro_batch = choose_micro_batch(trainer, arguments.micro_batch)
    row = measure(trainer, micro_batch, arguments.steps, end, None)
    # Those are the FLOPs of training every weight.
    for name in ("flops_per_token", "model_flops_per_second", "mfu"):
        row.pop(name)
    print(json.dumps({"contender": f"peft-{arguments.mode}", "recompute": arguments.recompute, **row}))


if __name__ == "__main__":
    main()
