"""Speed of LoRA training on this CPU beside peft and transformers, at the shape of `s2.yaml`, interleaved in one run.

    .venv-oracle/bin/python benches/cpu/adapters.py --rounds 5 --steps 6

Every round runs each contender once, one after the other, as `run.py` does; ratios are taken within a round and their
median is reported. Adapters of rank 16 are on every linear map of the blocks, without dropout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from contenders import HERE, OURS, UNLOCKED, Programs, Row

SHAPE, RANK = HERE / "s2.yaml", 16
PEERS = {
    "peft-fp32": ["fp32"],
    f"peft-fp32-{UNLOCKED}": ["fp32"],
    "peft-fp32-compile": ["fp32", "--compile"],
    "peft-bf16": ["bf16"],
    "peft-bf16-compile": ["bf16", "--compile"],
    "peft-bf16-f32-adapters": ["bf16", "--f32-adapters"],
}
"""Precision and options of `adapters_peer.py`. By default peft keeps adapters in f32 beside a model in bf16."""


def write_model(folder: Path) -> None:
    """Write the config of a model of this shape into a folder; neither side reads its weights."""
    model: dict[str, Any] = yaml.safe_load(SHAPE.read_text())["model"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.pop("num_layers"),
        "tie_word_embeddings": model.pop("tie_embeddings"),
        "rms_norm_eps": 1e-5,
        **model,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(programs: Programs, contender: str, steps: int) -> Row:
    """Train with a contender; return tokens per second and the peak resident memory."""
    counted = ["--config", str(SHAPE), "--steps", str(steps)]
    if contender in OURS:
        keys = {
            "model": json.dumps({"init_from": str(programs.scratch)}),
            "lora.rank": RANK,
            "runtime.precision": OURS[contender],
            "runtime.threads": programs.threads,
        }
        options = [f"--override={key}={value}" for key, value in keys.items()]
        command = [str(programs.trainer), "bench", "--json", *counted, *options]
    else:
        precision, *options = PEERS[contender]
        peer = [sys.executable, str(HERE / "adapters_peer.py"), "--model", str(programs.scratch), "--rank", str(RANK)]
        command = [*peer, "--threads", str(programs.threads), "--precision", precision, *options, *counted]
    rows, peak = programs.run(contender, command)
    return {"tokens_per_second": rows[-1]["tokens_per_second"], "peak_mebibytes": peak}


def report(rounds: list[dict[str, Row]]) -> str:
    """Return a table: the median speed of each contender, and our speed over it."""
    lines = [f"{'LoRA, S2':<30}{'tokens/s':>10}{'peak MiB':>10}{'speed of ours / its':>22}{'of each round':>18}"]
    for contender in rounds[0]:
        speeds, peaks = ([one[contender][name] for one in rounds] for name in ("tokens_per_second", "peak_mebibytes"))
        line = f"    {contender:<26}{statistics.median(speeds):>10.0f}{statistics.median(peaks):>10.0f}"
        if contender in PEERS:
            ours = f"ours-{PEERS[contender][0]}"
            own = [one[ours]["tokens_per_second"] for one in rounds]
            ratios = [mine / theirs for mine, theirs in zip(own, speeds, strict=True)]
            line += f"{statistics.median(ratios):>22.2f}{min(ratios):>10.2f} to {max(ratios):.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contender", choices=[*OURS, *PEERS], nargs="+", default=[*OURS, *PEERS])
    arguments = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs.build(Path(folder), arguments.threads)
        write_model(programs.scratch)
        for number in range(arguments.rounds):
            measurements = {}
            for contender in dict.fromkeys([*OURS, *arguments.contender]):
                measurements[contender] = measure(programs, contender, arguments.steps)
                row = {"round": number, "contender": contender, **measurements[contender]}
                print(json.dumps(row), file=sys.stderr, flush=True)
            rounds.append(measurements)
    print(report(rounds))


if __name__ == "__main__":
    main()
