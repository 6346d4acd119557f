"""Trains a model of transformers with DistributedDataParallel on given batches, and prints the loss of each step.

Run by `test_ranks.py` under torchrun: `ddp_losses.py MODEL BATCHES.npz LEARNING_RATE`. Every rank takes its share of
the sequences of each batch.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def main(start: str, batches: str, learning_rate: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32))
    decays = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed_tokens" in n]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    arrays = np.load(batches)
    for inputs, targets in zip(arrays["inputs"], arrays["targets"], strict=True):
        share = slice(rank * len(inputs) // ranks, (rank + 1) * len(inputs) // ranks)
        logits = model(input_ids=torch.from_numpy(inputs[share]).long()).logits
        labels = torch.from_numpy(targets[share]).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
