"""Checks training on several GPUs of this machine: the same bits as on one, also when a run moves between them.

python benches/gpu/check_ranks.py --gpus 2

Trains a small model for some steps on one GPU, on all, and stopped on all and resumed on one, with
`runtime.deterministic_reduction` and `runtime.deterministic`, and compares losses, gradient norms and weights bit by
bit; then once more on all without these keys, which may round differently. Needs the extras `cuda` and `distributed`.
With `--device cpu` it does the same with processes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 8
MODEL = (
    "--preset=smoke_cpu --hidden-size=256 --intermediate-size=768 --layers=4 --heads=4 --kv-heads=2 --seq-len=256 "
    "--vocab-size=4096 --learning-rate=1e-3 --warmup-steps=2 --log-every=1 --seed=7 --launch=none --dataset=demo "
    f"--stream --steps={STEPS} --checkpoint-every={STEPS // 2} --precision=bf16 --batch-size=2"
).split()
ROUNDING = 2e-3
"""Largest relative difference of bf16 losses between runs that sum in different orders."""


def main() -> int:
    """Run the check, and return its exit code."""
    parser = argparse.ArgumentParser(description="Compare training on several GPUs with training on one.")
    parser.add_argument("--gpus", type=int, default=2, help="ranks, a power of two")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    exact = (f"--override=runtime.deterministic_reduction={options.gpus}", "--override=runtime.deterministic=true")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("one", "all", "moved", "rounded"):
            orchestrate(root, *MODEL, f"--experiment={name}", f"--grad-accum={2 * options.gpus}")
        on = f"--device={options.device}"
        train(root, "one", on, *exact)
        train(root, "all", on, f"--nproc={options.gpus}", *exact)
        train(root, "moved", on, f"--nproc={options.gpus}", f"--max-steps={STEPS // 2}", *exact)
        train(root, "moved", on, "--resume", *exact)
        train(root, "rounded", on, f"--nproc={options.gpus}")
        outcomes = [same_bits(root, "all", "one"), same_bits(root, "moved", "one"), near(root, "rounded", "one")]
    print("passed" if all(outcomes) else "FAILED")
    return 0 if all(outcomes) else 1


def orchestrate(root: Path, *words: str) -> None:
    """Run `orchestrate` below a folder, or end with what it says."""
    process = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words], cwd=root, capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(
            f"orchestrate {' '.join(words)} ended with {process.returncode}:\n"
            f"{process.stdout[-2000:]}{process.stderr[-4000:]}"
        )


def train(root: Path, name: str, *words: str) -> None:
    """Train a run that was prepared."""
    print(f"training {name}: {' '.join(words)}", flush=True)
    orchestrate(root, "train", f"--config={root / 'runs' / name / 'training.yaml'}", *words)


def numbers(root: Path, name: str) -> list[tuple[float, ...]]:
    """Return step, loss and gradient norm of every step."""
    rows = map(json.loads, (root / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]


def same_bits(root: Path, name: str, expected: str) -> bool:
    """Compare losses, norms and the last weights of two runs."""
    weights = [
        (root / "runs" / run / "checkpoints" / f"step-{STEPS:08}" / "model.safetensors").read_bytes()
        for run in (name, expected)
    ]
    same = numbers(root, name) == numbers(root, expected) and weights[0] == weights[1]
    print(f"{name} and {expected}: {'the same bits' if same else 'DIFFER'}")
    if not same:
        print(*zip(numbers(root, name), numbers(root, expected), strict=False), sep="\n")
    return same


def near(root: Path, name: str, expected: str) -> bool:
    """Compare losses of two runs up to rounding."""
    pairs = zip(numbers(root, name), numbers(root, expected), strict=True)
    worst = max(abs(ours[1] - theirs[1]) / theirs[1] for ours, theirs in pairs)
    print(f"{name} and {expected}: losses differ by {worst:.1e} at most, {ROUNDING} is allowed")
    return worst <= ROUNDING


if __name__ == "__main__":
    sys.exit(main())
