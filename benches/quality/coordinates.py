"""The coordinate check of `model.base_hidden_size`: how much ten steps of training change the logits at several widths.

    .venv-oracle/bin/python benches/quality/coordinates.py --root DIR

With rates and initial values that transfer, the change does not depend on the width (Yang et al. 2022,
arXiv:2203.03466, appendix D.1). Prints the root mean square of the change, in Markdown.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import orchestrator
from rows import Row
from run import BUILT, Bench
from transformers import PreTrainedTokenizerFast

WIDTHS = (128, 256, 512, 1024)
HEAD_SIZE = 64
STEPS = 10
RATES = {"adamw": 4e-3, "muon": 1e-2}


def row(algorithm: str, width: int, is_scaled: bool) -> Row:
    """Return a run at one width, with a constant rate after two steps of warm-up."""
    sizes = (
        f"model.hidden_size={width}", f"model.intermediate_size={width * 8 // 3}", "model.num_layers=2",
        f"model.num_attention_heads={width // HEAD_SIZE}", f"model.num_key_value_heads={width // HEAD_SIZE // 2}",
        "data.sequence_length=128", "data.batch_size=8", "data.sequences_per_step=8", "scheduler.strategy=constant",
        "scheduler.warmup_steps=2", "runtime.precision=fp32", f"optimizer.algorithm={algorithm}",
        f"optimizer.learning_rate={RATES[algorithm]:g}",
    )  # fmt: skip
    scaled = (f"model.base_hidden_size={WIDTHS[0]}",) if is_scaled else ()
    return Row(f"coordinates-{algorithm}-{width}-{'scaled' if is_scaled else 'plain'}", "10m", (*sizes, *scaled))


def change(bench: Bench, trained: Row, tokens: list[int]) -> float:
    """Return the root mean square of the logits' change in `STEPS` optimizer steps."""
    folder = bench.root / "runs" / trained.name
    shutil.rmtree(folder, ignore_errors=True)
    config = orchestrator.RunConfig.load(bench.write_config(trained, folder), overrides=bench.overrides(trained))
    trainer = orchestrator.Trainer(config)
    before = orchestrator.logits(trainer.save(), tokens)
    for _ in zip(range(STEPS), trainer, strict=False):
        pass
    after = orchestrator.logits(trainer.save(), tokens)
    return float(np.sqrt(np.mean((after - before) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the bench, kept from run to run")
    bench = Bench(parser.parse_args().root.resolve(), BUILT)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bench.tokenizer))
    tokens = tokenizer(bench.held_out_texts()[0]).input_ids[:128]
    print(f"| rates and initial values | {' | '.join(map(str, WIDTHS))} |\n|---|{'--:|' * len(WIDTHS)}")
    for algorithm in RATES:
        for is_scaled in (True, False):
            changes = [change(bench, row(algorithm, width, is_scaled), tokens) for width in WIDTHS]
            label = f"{algorithm}, {'scaled by the width' if is_scaled else 'the same at every width'}"
            print(f"| {label} | {' | '.join(f'{value:.2f}' for value in changes)} |", flush=True)


if __name__ == "__main__":
    main()
