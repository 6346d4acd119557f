"""A LoRA step of Llama 3.1 8 B in bf16 on this CPU: its peak resident set beside what `plan` says, as one JSON line.

    python benches/cpu/eight_billion.py --folder /somewhere/with/18GB

writes a random model of those sizes, 16 GB in 4 shards, trains adapters of rank 16 for one step of 64 tokens, and
removes the folder again. `--base-precision fp8` holds the weights of the blocks in fp8. `--layers 4` takes an eighth of
the blocks: 3.8 GB. Peak memory is the kernel's count of the trainer's process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from orchestrator.safetensors_shards import StoredTensor, write_shards
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = json.loads((REPOSITORY / "benches" / "llama_8b" / "config.json").read_text())
"""The `config.json` of Llama 3.1 8 B, with the token ids of the tokenizer below."""
CONFIG = """
model: {{init_from: {model}}}
lora: {{rank: 16, alpha: 32, base_precision: {base_precision}}}
data: {{train_shards: [{text}], sequence_length: 64, batch_size: 1, gradient_accumulation_steps: 1,
       shuffle_buffer_size: 256}}
scheduler: {{strategy: constant, warmup_steps: 0, total_steps: {steps}}}
optimizer: {{learning_rate: 2.0e-4}}
runtime: {{device: cpu, precision: bf16, threads: {threads}, evaluation: {{every_n_steps: null}}, log_every_n_steps: 1}}
"""
ONE = 0x3F80
"""1.0 in bf16."""
PIECE = 1 << 24
"""Random numbers made at a time."""


def shapes(layers: int) -> Iterator[tuple[str, list[int]]]:
    """The tensors of the model under their names in transformers."""
    hidden, inner, vocabulary = (MODEL[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = hidden // MODEL["num_attention_heads"] * MODEL["num_key_value_heads"]
    yield "model.embed_tokens.weight", [vocabulary, hidden]
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{block}.self_attn.{name}_proj.weight", [rows, hidden]
        yield f"{block}.mlp.gate_proj.weight", [inner, hidden]
        yield f"{block}.mlp.up_proj.weight", [inner, hidden]
        yield f"{block}.mlp.down_proj.weight", [hidden, inner]
        yield f"{block}.input_layernorm.weight", [hidden]
        yield f"{block}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [vocabulary, hidden]


def write_model(folder: Path, layers: int) -> int:
    """Write a model directory whose tensors are slices of the same normal numbers; return its number of parameters."""
    tensors = dict(shapes(layers))
    sizes = {name: int(np.prod(shape)) for name, shape in tensors.items()}
    numbers, ones, most = folder.with_suffix(".numbers"), folder.with_suffix(".ones"), max(sizes.values())
    random = np.random.default_rng(8)
    with numbers.open("wb") as file:
        for _ in range(0, most + PIECE, PIECE):
            values = np.float32(0.02) * random.standard_normal(PIECE, dtype=np.float32)
            (values.view(np.uint32) >> 16).astype(np.uint16).tofile(file)
    np.full(MODEL["hidden_size"], ONE, np.uint16).tofile(ones)
    state_dict = {}
    for name, shape in tensors.items():
        elements = sizes[name]
        start = int(random.integers(0, most + PIECE - elements)) * 2 if len(shape) == 2 else 0
        source = numbers if len(shape) == 2 else ones
        state_dict[name] = StoredTensor("BF16", shape, elements, source, start, 2 * elements)
    folder.mkdir()
    total = 2 * sum(sizes.values())
    # The real model's shards have at most 5 GB, which gives 4.
    write_shards(state_dict, folder, "5GB" if total > 15e9 else total // 3)
    numbers.unlink()
    ones.unlink()
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return sum(sizes.values())


def peak_of(command: list[str]) -> int:
    """Run a command; return its peak resident memory in bytes."""
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        # Not `wait`, which would not tell this one process's memory.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_maxrss * 1024


def measure(root: Path, program: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan and train the run; return the planned and the peak bytes, with other figures."""
    start = time.monotonic()
    parameters = write_model(root / "model", options.layers)
    write_end = time.monotonic()
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n * n} " * 8}) + "\n" for n in range(400)))
    config = root / "run" / "training.yaml"
    config.parent.mkdir()
    paths = {"model": root / "model", "text": root / "text.jsonl"}
    words = {"steps": options.steps, "threads": options.threads, "base_precision": options.base_precision}
    config.write_text(CONFIG.format(**paths, **words))
    command = [str(program), "plan", "--config", str(config), "--json"]
    plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    run_start = time.monotonic()
    peak = peak_of([str(program), "train", "--config", str(config)])
    run_end = time.monotonic()
    rows = [json.loads(line) for line in (config.parent / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    return {
        "parameters": parameters,
        "shards": len(list((root / "model").glob("*.safetensors"))),
        "planned_bytes": plan["process_bytes"],
        "peak_bytes": peak,
        "ratio": peak / plan["process_bytes"],
        "write_seconds": write_end - start,
        "run_seconds": run_end - run_start,
        "step_seconds": [row["step_seconds"] for row in steps],
        "losses": [row["loss"] for row in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="that does not exist; it is removed again")
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--base-precision", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--program", type=Path, default=REPOSITORY / "target" / "release" / "transformer-candle")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        row = measure(options.folder.resolve(), options.program.resolve(), options)
    finally:
        shutil.rmtree(options.folder)
    print(json.dumps({"layers": options.layers, "base_precision": options.base_precision, **row}))


if __name__ == "__main__":
    main()
