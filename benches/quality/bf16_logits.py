"""What logits in bf16 do to losses and gradients: SmolLM2-135M in f32, its logits rounded, on the standard library.

PYTHONPATH=tests:tests/oracles .venv-oracle/bin/python benches/quality/bf16_logits.py --folder /tmp/with-1-GB
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from fake_hub.fineweb import documents
from real_model import smollm2
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 256
"""Tokens of a document at most."""


def rounded(values: Tensor) -> Tensor:
    """Return float64 numbers rounded to bf16."""
    return values.float().bfloat16().double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=12)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = smollm2(options.folder.resolve())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses, squares, largest = [], torch.zeros(3, dtype=torch.float64), 0.0
    for text in list(documents())[-options.documents :]:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : TOKENS + 1]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        targets = ids[0, 1:]
        losses.append(F.cross_entropy(rounded(logits), targets, reduction="none"))
        losses[-1] -= F.cross_entropy(logits, targets, reduction="none")
        ours, exact = (part.softmax(-1) - F.one_hot(targets, part.shape[1]) for part in (rounded(logits), logits))
        squares += torch.stack([part.square().sum() for part in (exact, ours - exact, rounded(exact) - exact)])
        largest = max(largest, logits.abs().max().item())
    differences = torch.cat(losses)
    row = {
        "tokens": differences.numel(),
        "largest_logit": largest,
        "loss_difference_mean": differences.mean().item(),
        "loss_difference_rms": differences.square().mean().sqrt().item(),
        "gradient_error_of_bf16_logits": (squares[1] / squares[0]).sqrt().item(),
        "gradient_error_of_bf16_gradient": (squares[2] / squares[0]).sqrt().item(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
