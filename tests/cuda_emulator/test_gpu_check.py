"""`gpu-check` and `bench` on the emulated GPU: a correct one passes, one with a broken kernel does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cuda_emulator.runs import Runs
from workspace import Finished

SMALL = ("gpu-check", "--size", "small", "--seed", "1")
OPERATIONS = (*SMALL, "--only", "operations")
MEMORY = (*SMALL, "--only", "memory")


def reports(process: Finished) -> dict[str, dict[str, Any]]:
    """Return the report that each part printed, in the order of the lines."""
    return {report["part"]: report for report in map(json.loads, process.out.splitlines())}


def failures(report: dict[str, Any]) -> dict[str, str]:
    return {row["check"]: row["failure"] for row in report["rows"] if row["failure"]}


@pytest.mark.parametrize(
    ("part", "check"),
    [
        ("training", "training bf16, twice"),
        ("gradients", "model bf16: qkv"),
        ("operations", "attention::backward bf16"),
        ("memory", "memory: planned and used"),
    ],
)
def test_a_correct_gpu_passes_every_check(runs: Runs, part: str, check: str) -> None:
    process = runs.program("gpu-check", "--size", "small", "--json", "--only", part)
    process.succeeded()
    checked_parts = reports(process)
    assert list(checked_parts) == [part]
    assert checked_parts[part]["passed"]
    assert "cuda:0" in checked_parts[part]["device"]
    assert check in {row["check"] for row in checked_parts[part]["rows"]}
    assert check in process.err, "rows come as they are made"


def test_a_failed_launch_leaves_what_was_checked_before(runs: Runs) -> None:
    """The failure is like an illegal address on a GPU: every later call fails."""
    faulty_gpu = runs.having(fault="swiglu_backward.bf16")
    process = faulty_gpu.program(*OPERATIONS, "--json", "--only", "memory")
    assert process.code == 1
    checked_parts = reports(process)
    assert list(failures(checked_parts["operations"])) == ["swiglu::backward bf16", "operations: runs to its end"]
    assert len(checked_parts["operations"]["rows"]) > 10, "the rows of before are there"
    assert list(failures(checked_parts["memory"])) == ["memory: runs to its end"]


def test_a_plan_that_does_not_fit_is_a_failed_row(runs: Runs) -> None:
    small = runs.having(memory=512 << 20)
    process = small.program(*OPERATIONS, "--json", "--only", "memory")
    assert process.code == 1
    checked_parts = reports(process)
    assert checked_parts["operations"]["passed"]
    assert "does not fit" in failures(checked_parts["memory"])["memory: the plan fits"]


def test_memory_passes_while_others_take_some(runs: Runs) -> None:
    """The free memory falls all the time, as with a desktop or a browser on the same GPU."""
    runs.having(drift=1 << 16).program(*MEMORY).succeeded()


def test_nothing_is_timed_on_zeros(runs: Runs) -> None:
    counting = runs.having(report=runs.workspace.root / "report.json")
    counting.program(*MEMORY).succeeded()
    counts = counting.emulator.report()
    assert counts["gemms"] > 0
    assert counts["gemms_of_zeros"] == 0


def test_a_broken_kernel_fails_its_operation_alone(runs: Runs) -> None:
    process = runs.having(**{"break": "swiglu_backward.bf16"}).program(*OPERATIONS)
    assert process.code == 1
    *rows, verdict = process.out.splitlines()
    failed = [row for row in rows if "FAILED" in row]
    assert len(failed) == 1, failed
    assert failed[0].startswith("swiglu::backward bf16")
    assert verdict.startswith("FAILED: 1 of ")


def test_bench_measures_parts_and_memory(runs: Runs) -> None:
    process = bench(runs, "--device", "cuda").succeeded()
    report = json.loads(process.out)
    assert report["mfu"] > 0
    assert report["mfu_measured"] > 0
    assert abs(report["memory_used_bytes"] / report["memory_bytes"] - 1) < 0.03
    parts = report["milliseconds"]
    assert all(parts[part] > 0 for part in ("attention", "gemm", "head_and_loss", "norm_and_pointwise", "optimizer"))
    assert report["nominal_flops_per_second"] == 209.5e12


def bench(runs: Runs, *options: str) -> Finished:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_attention_heads": 2}
    config = {
        "model": sizes,
        "data": {"sequence_length": 32, "batch_size": 1, "gradient_accumulation_steps": 1},
        "scheduler": {"total_steps": 10},
        "runtime": {"precision": "bf16"},
    }
    path = runs.workspace.root / "bench.json"
    path.write_text(json.dumps(config))
    return runs.program("bench", "--json", "--config", path, "--steps", "1", *options)


def test_bench_says_why_it_does_not_use_a_gpu(runs: Runs) -> None:
    process = bench(runs.having(gpu="Tesla T4", capability="7.5")).succeeded()
    assert json.loads(process.out)["device"] == "cpu"
    assert "on the CPU: Tesla T4 has compute capability 7.5" in process.err


def test_a_slice_of_a_gpu_has_no_mfu(runs: Runs) -> None:
    mig = runs.having(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb", capability="8.0")
    report = json.loads(bench(mig, "--device", "cuda").succeeded().out)
    assert report["mfu"] is None
    assert report["nominal_flops_per_second"] is None
    assert report["mfu_measured"] > 0
