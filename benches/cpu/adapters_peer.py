"""A LoRA step with peft and transformers, as someone would write it: prints one JSON line.

The same shape, tokens per step, optimizer and clipping as `transformer-candle bench` on the same config.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import yaml
from peer import median_seconds
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a `config.json`")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--precision", choices=DTYPES, required=True)
    parser.add_argument("--f32-adapters", action="store_true", help="beside a model in bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    data = yaml.safe_load(arguments.config.read_text())["data"]
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))
    model = model.to(DTYPES[arguments.precision])
    lora = LoraConfig(r=arguments.rank, lora_alpha=arguments.rank, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=arguments.f32_adapters)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if arguments.compile else model
    tokens = torch.randint(0, model.config.vocab_size, (2, data["batch_size"], data["sequence_length"]))

    def step() -> None:
        logits = forward(input_ids=tokens[0], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[1].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(json.dumps({"tokens_per_second": tokens[0].numel() / median_seconds(step, 2, arguments.steps)}))


if __name__ == "__main__":
    main()
