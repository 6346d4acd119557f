"""How close the step time that `plan` predicts on this CPU is to the measured one.

    python benches/cpu/prediction.py --rounds 5

runs `transformer-candle bench` on S1, S2, smoke_cpu, a model of 100 M parameters and two shapes drawn at random, one
after the other, `--rounds` times: `bench` first predicts a step, as `plan` does, then measures `--steps` steps. Printed
are the medians over the rounds, which a machine with other work on it needs, and whether each ratio is within 10 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 0.10
HUNDRED_MILLION = (
    "model: {vocab_size: 16384, hidden_size: 768, intermediate_size: 2048, num_layers: 13, num_attention_heads: 12, "
    "num_key_value_heads: 4, max_position_embeddings: 512}\n"
    "data: {sequence_length: 512, batch_size: 4, sequences_per_step: 8}\n"
    "scheduler: {total_steps: 1000}\n"
    "runtime: {device: cpu, precision: bf16}\n"
)


def random_shape(numbers: random.Random) -> str:
    """Return a config of 1 to 40 M parameters with random sizes, precision, optimizer and recompute mode."""
    heads = numbers.choice([4, 6, 8, 10])
    hidden = heads * numbers.choice([32, 64])
    micro_batch = numbers.choice([2, 4, 8])
    sequence = numbers.choice([128, 256, 512])
    model = {
        "vocab_size": numbers.randrange(1000, 20000),
        "hidden_size": hidden,
        "intermediate_size": 32 * round(hidden * numbers.uniform(2.0, 4.0) / 32),
        "num_layers": numbers.randrange(3, 13),
        "num_attention_heads": heads,
        "num_key_value_heads": numbers.choice([1, 2, heads]),
        "max_position_embeddings": sequence,
        "tie_embeddings": numbers.choice([True, False]),
    }
    accumulation = numbers.choice([1, 2, 4])
    data = {"sequence_length": sequence, "batch_size": micro_batch, "sequences_per_step": micro_batch * accumulation}
    runtime = {
        "device": "cpu",
        "precision": numbers.choice(["fp32", "bf16"]),
        "activation_recompute": numbers.choice(["none", "selective", "block"]),
    }
    config = {
        "model": model,
        "data": data,
        "optimizer": {"algorithm": numbers.choice(["adamw", "muon"])},
        "scheduler": {"total_steps": 1000},
        "runtime": runtime,
    }
    return json.dumps(config)


def configs(folder: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of every config that is checked."""
    yield "S1", REPOSITORY / "benches" / "cpu" / "s1.yaml"
    yield "S2", REPOSITORY / "benches" / "cpu" / "s2.yaml"
    yield "smoke_cpu", REPOSITORY / "configs" / "smoke_cpu.yaml"
    numbers = random.Random(seed)
    shapes = {"100 M": HUNDRED_MILLION, "random 1": random_shape(numbers), "random 2": random_shape(numbers)}
    for name, text in shapes.items():
        path = folder / f"{name.replace(' ', '_')}.yaml"
        path.write_text(text, encoding="utf-8")
        yield name, path


def bench(program: Path, config: Path, steps: int) -> dict[str, Any]:
    """Return the report of one run of `bench`."""
    command = [program, "bench", "--json", f"--config={config}", f"--steps={steps}"]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(process.stdout)
    return report


def main() -> int:
    """Print a table; return 1 if a prediction is further off than 10 %."""
    parser = argparse.ArgumentParser(description="Predicted beside measured step times.")
    parser.add_argument("--program", type=Path, default=REPOSITORY / "target" / "release" / "transformer-candle")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the shapes drawn at random")
    parser.add_argument("--only", help="the name of one config")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen_configs = dict(configs(Path(folder), arguments.seed))
        if arguments.only:
            chosen_configs = {arguments.only: chosen_configs[arguments.only]}
        predicted: dict[str, list[float]] = {name: [] for name in chosen_configs}
        measurements: dict[str, list[float]] = {name: [] for name in chosen_configs}
        for _ in range(arguments.rounds):
            for name, path in chosen_configs.items():
                report = bench(arguments.program, path, arguments.steps)
                predicted[name].append(report["prediction"]["step_milliseconds"][0])
                measurements[name].append(report["median_step_milliseconds"])
    print("| config | predicted ms | measured ms | ratio | ratio of each round |\n|---|--:|--:|--:|---|")
    worst = 0.0
    for name in chosen_configs:
        expected, real = statistics.median(predicted[name]), statistics.median(measurements[name])
        rounds = [p / m for p, m in zip(predicted[name], measurements[name], strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in rounds)
        print(f"| {name} | {expected:.1f} | {real:.1f} | {expected / real:.3f} | {each} |")
        worst = max(worst, abs(expected / real - 1))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
