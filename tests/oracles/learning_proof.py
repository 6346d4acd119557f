"""Train one small model here and in PyTorch: same start, same batches, same settings; compare what was learnt.

Run `make learning-proof`. Both sides start from our step-0 checkpoint, see the batches of `orchestrator.TokenStream`
and take 2,000 AdamW steps; PyTorch (transformers' Llama) then measures the validation loss of both final models on the
same held-out text. bfloat16 is our bf16 policy against PyTorch's autocast. Prints a JSON line per precision and exits 1
when the two losses differ by more than 0.02.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from fake_hub.fineweb import documents
from orchestrator import RunConfig, TokenStream, Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

ALLOWED_DIFFERENCE = 0.02
SEQUENCE, PEAK, FLOOR, WARMUP = 128, 2e-3, 2e-4, 100


def prepare(folder: Path, steps: int, precision: str) -> Path:
    """Write the texts, train the tokenizer and return the run's config."""
    texts = list(documents())
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[100:]))
    (folder / "validation.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:100]))
    flags = (
        f"--preset=smoke_cpu --input=train.jsonl --validation=validation.jsonl --experiment={precision} --launch=none "
        f"--hidden-size=96 --intermediate-size=256 --layers=3 --heads=6 --kv-heads=2 --vocab-size=2048 "
        f"--seq-len={SEQUENCE} --batch-size=8 --grad-accum=1 --steps={steps} --precision={precision} --device=cpu "
        f"--learning-rate={PEAK} --warmup-steps={WARMUP} --schedule=cosine --weight-decay=0.1 --seed=1 "
        f"--checkpoint-every={steps} --evaluate-every={steps} --log-every=100 "
        f"--override scheduler.min_lr={FLOOR} --override optimizer.max_grad_norm=1.0 "
        "--override optimizer.algorithm=adamw"
    ).split()
    orchestrate = Path(sys.executable).parent / "orchestrate"
    subprocess.run([orchestrate, *flags], cwd=folder, check=True)
    return folder / "runs" / precision / "training.yaml"


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: linear warm-up, then cosine; `step` counts from 0."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def train_in_pytorch(start: Path, config: RunConfig, steps: int, precision: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    model.train()
    decays = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed_tokens" in n]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    for step, (inputs, targets) in zip(range(steps), TokenStream(config), strict=False):
        with autocast:
            logits = model(input_ids=torch.from_numpy(inputs).long()).logits
        labels = torch.from_numpy(targets).long().flatten()
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        if step % 200 == 0:
            print(f"pytorch {precision} step {step} loss {loss.item():.4f}", file=sys.stderr)
    return model


@torch.no_grad()
def validation_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path) -> float:
    """Return the mean loss in nats over the validation text, cut in sequences."""
    model.eval()
    end = tokenizer.eos_token_id
    stream = [end]
    for line in path.read_text().splitlines():
        stream += [*tokenizer(json.loads(line)["text"]).input_ids, end]
    count = (len(stream) - 1) // SEQUENCE
    ids = torch.tensor(stream[: count * SEQUENCE + 1])
    inputs, targets = ids[:-1].view(count, SEQUENCE), ids[1:].view(count, SEQUENCE)
    total = 0.0
    for begin in range(0, count, 32):
        logits = model(input_ids=inputs[begin : begin + 32]).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), targets[begin : begin + 32].flatten(), reduction="sum").item()
    return total / (count * SEQUENCE)


def compare(folder: Path, steps: int, precision: str) -> float:
    """Train on both sides, print the figures and return how far the losses are apart."""
    config = RunConfig.load(prepare(folder, steps, precision))
    trainer = Trainer(config)
    start = Path(trainer.save())
    begin = time.perf_counter()
    for _ in trainer:
        pass
    ours_seconds = time.perf_counter() - begin
    ours = AutoModelForCausalLM.from_pretrained(trainer.save(), dtype=torch.float32)
    begin = time.perf_counter()
    theirs = train_in_pytorch(start, config, steps, precision)
    theirs_seconds = time.perf_counter() - begin
    tokenizer = AutoTokenizer.from_pretrained(start)
    losses = [validation_loss(model, tokenizer, folder / "validation.jsonl") for model in (ours, theirs)]
    row = {
        "precision": precision, "steps": steps, "ours": round(losses[0], 4), "pytorch": round(losses[1], 4),
        "difference": round(losses[0] - losses[1], 4), "ours_seconds": round(ours_seconds, 1),
        "pytorch_seconds": round(theirs_seconds, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return abs(losses[0] - losses[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for the runs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    differences = [compare(arguments.folder, arguments.steps, precision) for precision in arguments.precision]
    sys.exit(max(differences) > ALLOWED_DIFFERENCE)


if __name__ == "__main__":
    main()
