"""What a base in fp8 costs LoRA: losses of SmolLM2-135M after 100 steps beside each kind of base, seed by seed.

    PYTHONPATH=tests:tests/oracles .venv-oracle/bin/python benches/quality/base_precision.py --folder /tmp/with-4-GB

Every seed trains three runs on the same batches: a base in bf16, one in fp8 beside bf16 matmuls, and fp8 matmuls. The
text is the standard library's sources, the last documents held out. Three losses of each run on these: beside the base
that it trained with, beside the bf16 weights, and of the model with the adapters merged into the bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from fake_hub.fineweb import documents
from real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
BASES = {
    "bf16": ("bf16", "auto"),
    "fp8 base, bf16 matmuls": ("bf16", "fp8"),
    "fp8 matmuls": ("fp8", "auto"),
}
"""`runtime.precision` and `lora.base_precision` of each run."""
HELD_OUT = 100
LOSSES = ("as trained", "beside bf16", "merged")
CONFIG = """
model: {{init_from: {model}}}
lora: {{rank: 16, alpha: 32, base_precision: {base_precision}}}
data: {{train_shards: [{folder}/train.jsonl], validation_shards: [{folder}/held_out.jsonl], sequence_length: 128,
       batch_size: 2, gradient_accumulation_steps: 2, shuffle_buffer_size: 1024}}
optimizer: {{learning_rate: 5.0e-4}}
scheduler: {{strategy: cosine, warmup_steps: 10, total_steps: {steps}}}
runtime: {{device: cpu, seed: {seed}, precision: {precision}, checkpoint: {{every_n_steps: {steps}}},
          evaluation: {{every_n_steps: {steps}, max_batches: 16}}, log_every_n_steps: 10}}
"""


def write_text(folder: Path) -> None:
    """Write the documents to train on and those held out."""
    lines = [json.dumps({"text": text}) + "\n" for text in documents()]
    (folder / "train.jsonl").write_text("".join(lines[:-HELD_OUT]))
    (folder / "held_out.jsonl").write_text("".join(lines[-HELD_OUT:]))


def write_bf16(model: Path, folder: Path) -> None:
    """Write the model in bf16, as models are published."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def output(*command: str | Path) -> str:
    """Run a command; return what it prints."""
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def losses(program: Path, folder: Path, name: str, seed: int, steps: int) -> dict[str, float]:
    """Train a run; return its losses on the held-out text."""
    precision, base_precision = BASES[name]
    run = folder / f"{precision}-{base_precision}-{seed}"
    run.mkdir()
    config, held_out = run / "training.yaml", folder / "held_out.jsonl"
    words = {"precision": precision, "base_precision": base_precision, "seed": seed, "steps": steps}
    config.write_text(CONFIG.format(model=folder / "SmolLM2-bf16", folder=folder, **words))
    output(program, "train", "--config", config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row["loss"] for row in rows if row["kind"] == "evaluation"][-1]
    checkpoint, merged = run / "checkpoints" / f"step-{steps:08}", run / "merged"
    orchestrate = Path(sys.executable).with_name("orchestrate")
    output(orchestrate, "export", "--checkpoint", checkpoint, "--format=hf", "--merge", f"--out={merged}")

    def evaluated(model: Path) -> float:
        words = ("--input", held_out, "--max-sequences", "32", "--device", "cpu", "--json")
        return float(json.loads(output(program, "evaluate", "--checkpoint", model, *words))["loss"])

    return dict(zip(LOSSES, (trained, evaluated(checkpoint), evaluated(merged)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--program", type=Path, default=REPOSITORY / "target" / "release" / "transformer-candle")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    write_bf16(smollm2(folder), folder / "SmolLM2-bf16")
    by_base: dict[str, list[dict[str, float]]] = {name: [] for name in BASES}
    for seed in range(options.seeds):
        for name, rows in by_base.items():
            rows.append(losses(options.program.resolve(), folder, name, seed, options.steps))
            print(json.dumps({"seed": seed, "base": name, **rows[-1]}), flush=True)
    for name, rows in by_base.items():
        for loss in LOSSES:
            differences = [row[loss] - other[loss] for row, other in zip(rows, by_base["bf16"], strict=True)]
            print(
                f"{name:<24}{loss:<14}{statistics.mean(row[loss] for row in rows):>8.4f}"
                f"{statistics.mean(differences):>+9.4f}  {' '.join(f'{value:+.4f}' for value in differences)}"
            )


if __name__ == "__main__":
    main()
