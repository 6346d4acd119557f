"""Steps of a run's model with PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer, as someone would write it.

Run by `run.py`, under torchrun for several processes: `peer.py CONFIG --steps N`. The model is transformers' Llama with
the shape of the config, in f32; the step has its sequences in its micro-batches, which the processes share, AdamW with
its clipping, and random tokens that are there from the start. Gradients are exchanged during the last backward pass
only (`no_sync`). One process uses neither. Rank 0 prints one JSON line with the seconds of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from orchestrator import RunConfig
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def llama(model: dict[str, Any]) -> LlamaForCausalLM:
    """Return the model of a config with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model["vocab_size"],
            hidden_size=model["hidden_size"],
            intermediate_size=model["intermediate_size"],
            num_hidden_layers=model["num_layers"],
            num_attention_heads=model["num_attention_heads"],
            num_key_value_heads=model["num_key_value_heads"],
            head_dim=model["head_dim"] or model["hidden_size"] // model["num_attention_heads"],
            max_position_embeddings=model["max_position_embeddings"],
            rms_norm_eps=model["norm_epsilon"],
            tie_word_embeddings=model["tie_embeddings"],
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def adamw(model: LlamaForCausalLM, settings: dict[str, Any], ranks: int) -> torch.optim.Optimizer:
    """Return AdamW whose state several processes share."""
    named_parameters = list(model.named_parameters())
    decays = [p for name, p in named_parameters if p.dim() == 2 and "embed_tokens" not in name]
    others = [p for name, p in named_parameters if p.dim() == 1 or "embed_tokens" in name]
    groups = [{"params": decays, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    betas = settings["beta1"], settings["beta2"]
    options = {"lr": settings["learning_rate"], "betas": betas, "eps": settings["epsilon"], "fused": True}
    if ranks == 1:
        return torch.optim.AdamW(groups, **options)
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)


def stepper(config: dict[str, Any], ranks: int, compiled: bool) -> Callable[[], float]:
    """Return a function that takes a training step and returns this rank's loss."""
    data = config["data"]
    micro_batches = data["sequences_per_step"] // data["batch_size"] // ranks
    alone = llama(config["model"])
    optimizer = adamw(alone, config["optimizer"], ranks)
    model: Any = torch.compile(alone) if compiled else alone
    if ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    shape = (2, micro_batches, data["batch_size"], data["sequence_length"])
    inputs, targets = torch.randint(0, config["model"]["vocab_size"], shape)

    def step() -> float:
        total = torch.zeros(())
        for index in range(micro_batches):
            is_last = index + 1 == micro_batches
            with nullcontext() if ranks == 1 or is_last else model.no_sync():
                logits = model(input_ids=inputs[index]).logits
                loss = cross_entropy(logits.flatten(0, 1), targets[index].flatten()) / micro_batches
                loss.backward()
                total += loss.detach()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), config["optimizer"]["max_grad_norm"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=ranks == 1)
        return total.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(rank)
    step = stepper(RunConfig.load(arguments.config).to_dict(), ranks, arguments.compile)
    seconds = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
