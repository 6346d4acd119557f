"""`gpu-check` and `bench` on the emulated card: a sound one passes, one with a broken kernel does not."""

from __future__ import annotations

import json

from cuda_emulator.runs import Runs

OPERATIONS = ("gpu-check", "--size", "small", "--only", "operations", "--seed", "1")


def test_a_sound_card_passes_every_check(runs: Runs) -> None:
    finished = runs.program("gpu-check", "--size", "small", "--json")
    finished.succeeded()
    report = json.loads(finished.out)
    assert report["passed"]
    assert "cuda:0" in report["device"]
    checks = {row["check"] for row in report["rows"]}
    assert {"memory: planned and used", "attention::backward bf16", "model bf16: qkv", "training bf16, twice"} <= checks
    assert "swiglu::forward bf16" in finished.err, "rows come as they are made"


def test_a_broken_kernel_fails_its_operation_alone(runs: Runs) -> None:
    finished = runs.having(**{"break": "swiglu_backward.bf16"}).program(*OPERATIONS)
    assert finished.code == 1
    *rows, verdict = finished.out.splitlines()
    failed = [row for row in rows if "FAILED" in row]
    assert len(failed) == 1, failed
    assert failed[0].startswith("swiglu::backward bf16")
    assert verdict.startswith("FAILED: 1 of ")


def test_bench_measures_parts_and_memory(runs: Runs) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_attention_heads": 2}
    config = {
        "model": sizes,
        "data": {"sequence_length": 32, "batch_size": 1, "gradient_accumulation_steps": 1},
        "scheduler": {"total_steps": 10},
        "runtime": {"precision": "bf16"},
    }
    path = runs.workspace.root / "bench.json"
    path.write_text(json.dumps(config))
    finished = runs.program("bench", "--config", path, "--steps", "1", "--device", "cuda")
    finished.succeeded()
    report = json.loads(finished.out)
    assert report["mfu"] > 0
    assert report["mfu_measured"] > 0
    assert abs(report["memory_used_bytes"] / report["memory_bytes"] - 1) < 0.03
    parts = report["milliseconds"]
    assert all(parts[part] > 0 for part in ("attention", "gemm", "head_and_loss", "norm_and_pointwise", "optimizer"))
