"""Make the golden checkpoints: `python tests/golden/make_checkpoints.py FORMAT TRAINER [KIND...]`.

Each folder of `checkpoints/` is a run that was stopped after 4 of 8 steps, as a landed version of the trainer wrote it,
and `expected.json`: what the same version wrote of steps 5 to 8 without a stop. `tests/test_golden_checkpoints.py`
resumes each. A folder is made once, by the version whose format it shows, and never made again; a new format gets
folders of its own. `first` is the first format; `execution` adds how steps are computed; `windows` is the same format,
stopped after its first shuffle window, so that the data cursor lies within a file. The kinds `adapters_...` train
adapters beside the frozen model in `model/`. `reading_2` has the reading version 2; its kind `files_fp32` has a file
that cannot be decoded, and has accepted after two steps that another one has grown. `units` adds the processor's
units that multiplied bf16, and `base` the precision that a frozen model is held in.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
GROWN_AT, STOPPED_AT, STEPS = 2, 4, 8
CONFIG = """
{model}
tokenizer: {{tokenizer_json: tokenizer.json}}
data: {{{data}, sequence_length: 32, batch_size: {batch_size}, sequences_per_step: 4, shuffle_buffer_size: 4,
       held_out_fraction: 0.1, num_workers: 1}}
optimizer: {{learning_rate: 5.0e-3}}
scheduler: {{strategy: cosine, warmup_steps: 2, total_steps: {steps}}}
runtime:
  device: cpu
  seed: 7
  threads: 1
  precision: {precision}
  log_every_n_steps: 1
  checkpoint: {{every_n_steps: {stopped_at}, max_keep: 1}}
  evaluation: {{every_n_steps: 2, max_batches: 1}}
  logging: {{tensorboard: false}}
"""
SHARDS = "train_shards: [corpus.jsonl]"
MIXTURE = "mixture: [{shards: [corpus.jsonl], weight: 3}, {shards: [few.jsonl], weight: 1}]"
FILES = "train_shards: [corpus.jsonl, few.jsonl, bad.jsonl.gz]"
RANDOM = (
    "model: {hidden_size: 16, intermediate_size: 32, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
)
# Matmuls in fp8 need sizes that are multiples of 16.
WIDER = "model: {hidden_size: 32, intermediate_size: 32, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
ADAPTERS = "model: {init_from: model}\nlora: {rank: 2, alpha: 4, dropout: 0.1}"
FP8_BASE = "model: {init_from: model}\nlora: {rank: 2, alpha: 4, base_precision: fp8}"
PRETRAINED = {ADAPTERS: RANDOM, FP8_BASE: WIDER}
RUNS = {
    "fp32": (RANDOM, SHARDS, "fp32"), "bf16_mixture": (RANDOM, MIXTURE, "bf16"),
    "files_fp32": (RANDOM, FILES, "fp32"),
    "adapters_fp32": (ADAPTERS, SHARDS, "fp32"), "adapters_bf16": (ADAPTERS, SHARDS, "bf16"),
    "adapters_fp8": (FP8_BASE, SHARDS, "bf16"),
}  # fmt: skip
KEPT = ("training.yaml", "resolved_config.json", "ledger.jsonl", "metrics.jsonl")
OF_A_MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main(format_name: str, trainer: Path, kinds: list[str]) -> None:
    for kind in kinds or RUNS:
        with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            make(CHECKPOINTS / f"{format_name}_{kind}", Path(scratch), trainer.resolve(), *RUNS[kind])


def make(golden: Path, scratch: Path, trainer: Path, model: str, data: str, precision: str) -> None:
    (scratch / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (scratch / "corpus.jsonl").write_text(documents(120), encoding="utf-8")
    few = scratch / "few.jsonl"
    few.write_text(documents(20), encoding="utf-8")
    if data == FILES:
        (scratch / "bad.jsonl.gz").write_bytes(gzip.compress(documents(20).encode(), mtime=0)[:40])

    def train(name: str, model: str, most: int) -> None:
        run = scratch / name
        run.mkdir()
        settings = {"model": model, "data": data, "precision": precision, "batch_size": 2}
        text = CONFIG.format(**settings, steps=STEPS, stopped_at=STOPPED_AT)
        (run / "training.yaml").write_text(text, encoding="utf-8")
        words = [trainer, "train", "--config", run / "training.yaml"]

        def go(most: int, *flags: str) -> None:
            subprocess.run([*map(str, words), *flags, f"--max-steps={most}"], cwd=scratch, check=True)

        if data == FILES:
            few.write_text(documents(20), encoding="utf-8")
            go(GROWN_AT)
            few.write_text(documents(25), encoding="utf-8")
            go(most, "--resume", "--accept-changed-data")
        else:
            go(most)

    if model in PRETRAINED:
        train("base", PRETRAINED[model], STOPPED_AT)
        (scratch / "model").mkdir()
        for name in OF_A_MODEL:
            shutil.copy2(scratch / "base" / "checkpoints" / f"step-{STOPPED_AT:08}" / name, scratch / "model" / name)
    train("stopped", model, STOPPED_AT)
    train("straight", model, STEPS)
    shutil.rmtree(golden, ignore_errors=True)
    if model in PRETRAINED:
        shutil.copytree(scratch / "model", golden / "model")
    shutil.copytree(scratch / "stopped" / "checkpoints", golden / "run" / "checkpoints", symlinks=True)
    for name in KEPT:
        shutil.copy2(scratch / "stopped" / name, golden / "run" / name)
    for path in (scratch / "tokenizer.json", *scratch.glob("*.jsonl*")):
        shutil.copy2(path, golden / path.name)
    expected = {"losses": losses(scratch / "straight"), "ledger": steps(scratch / "straight")}
    (golden / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def losses(run: Path) -> dict[str, float]:
    """Return the training loss of each step after the stop."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {str(row["step"]): row["loss"] for row in rows if row["kind"] == "train" and row["step"] > STOPPED_AT}


def steps(run: Path) -> list[dict[str, object]]:
    """Return the ledger's records of the steps after the stop, with the hashes of their batches."""
    rows = map(json.loads, (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["kind"] == "step" and row["step"] > STOPPED_AT]


def documents(count: int) -> str:
    """Return sentences with a pattern to learn, made by a small generator of numbers (Lehmer's, MINSTD)."""
    animals, verbs = ("cat", "dog", "owl", "bee", "hen"), ("sees", "hears", "likes", "meets")
    state = 1

    def pick(below: int) -> int:
        nonlocal state
        state = state * 48_271 % 0x7FFFFFFF
        return state // 16 % below

    lines = []
    for _ in range(count):
        sentences = [f"the {animals[pick(5)]} {verbs[pick(4)]} the {animals[pick(5)]}." for _ in range(1 + pick(6))]
        lines.append(json.dumps({"text": " ".join(sentences)}))
    return "\n".join(lines) + "\n"


def tokenizer_json() -> str:
    """Return a byte-level BPE tokenizer: the 256 bytes, three merges and end-of-text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = sorted(chr(byte) for byte in printable) + [chr(256 + place) for place in range(len(others))]
    merges = [["t", "h"], ["th", "e"], ["\u0120", "the"]]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end_of_text = {
        "id": len(vocab), "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    model = {
        "type": "BPE", "vocab": vocab, "merges": merges, "dropout": None, "unk_token": None,
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False,
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end_of_text], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return json.dumps(whole, indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
