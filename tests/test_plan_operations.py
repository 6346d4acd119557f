"""`plan --operations` as a user runs it: rows against closed forms of the config's sizes, and what documents quote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from workspace import REPOSITORY, Workspace

DECISION = REPOSITORY / "docs" / "decisions" / "012-roofline-of-a-32-gb-gpu.md"
CONFIG = REPOSITORY / "configs" / "rtx5090_1b.yaml"
WORDS = (f"--config={CONFIG}", "--override=data.batch_size=4", "--operations")
LAYERS, HIDDEN, INTERMEDIATE, PACKED, VOCABULARY = 20, 2048, 8192, 3072, 50_048
TOKENS, SEQUENCE, MICRO_BATCHES = 8192, 2048, 16
# Nominal FLOPs and bytes per second, and the fractions sustained by GEMMs, attention forward and backward, and memory.
RATES = {"rtx5090": (209.5e12, 1.792e12, 0.92, 0.60, 0.50, 0.90), "h200": (989e12, 4.8e12, 0.77, 0.32, 0.27, 0.90)}


def planned(workspace: Workspace, *words: str | Path) -> dict[str, Any]:
    return dict(json.loads(workspace.orchestrate("plan", "--json", *WORDS, *words).succeeded().out))


def table(workspace: Workspace, *words: str | Path) -> str:
    """Return what the command prints after the plan."""
    text = workspace.orchestrate("plan", *WORDS, *words).succeeded().out
    return "The operations of a step" + text.partition("The operations of a step")[2].rstrip("\n")


def cell(row: str, number: int) -> float:
    return float(row[26:].replace(",", "").replace("%", "").split()[number])


def seconds(gpu: str) -> dict[str, float]:
    """Return the time of each operation of a step by a roofline that is written here once more, from the sizes."""
    flops, bandwidth, gemm, forward, backward, memory = RATES[gpu]
    blocks, batches = MICRO_BATCHES * LAYERS, MICRO_BATCHES
    row, attention = 2 * TOKENS * HIDDEN, TOKENS * SEQUENCE * HIDDEN
    parameters = LAYERS * (HIDDEN * (PACKED + HIDDEN + 3 * INTERMEDIATE) + 2 * HIDDEN) + (VOCABULARY + 1) * HIDDEN

    def moved(count: float, moved_bytes: float) -> float:
        return count * moved_bytes / (bandwidth * memory)

    def matmul(count: float, m: int, n: int, k: int, result_bytes: int) -> float:
        operands = 2 * (m * k + k * n) + result_bytes * m * n
        return max(count * 2 * m * n * k / (flops * gemm), moved(count, operands))

    times = {
        "attention forward": blocks * 2 * attention / (flops * forward),
        "attention backward": blocks * 5 * attention / (flops * backward),
        "add_rms_norm forward": moved(2 * blocks - batches, 4 * row) + moved(batches, 2 * row),
        "add_rms_norm backward": moved(2 * blocks, 4 * row),
        "add_rms_norm normalize": moved(2 * blocks, 2 * row),
        "rope forward": moved(blocks, 2 * 2 * TOKENS * 40 * 64),
        "rope backward": moved(blocks, 2 * 2 * TOKENS * 40 * 64),
        "swiglu forward": moved(blocks, 2 * 3 * TOKENS * INTERMEDIATE),
        "swiglu backward": moved(blocks, 2 * 6 * TOKENS * INTERMEDIATE),
        "head logits": matmul(4 * batches, 2048, VOCABULARY, HIDDEN, 4),
        "head softmax and gradient": moved(4 * batches, 10 * 2048 * VOCABULARY),
        "head dX": matmul(4 * batches, 2048, HIDDEN, VOCABULARY, 2),
        "head dW": matmul(4 * batches, VOCABULARY, HIDDEN, 2048, 8),
        "embedding forward": moved(batches, 2 * row),
        "embedding backward": moved(batches, 5 * row),
        "last norm forward": moved(batches, 4 * row),
        "last norm backward": moved(batches, 5 * row),
        "grad_norm forward": moved(1, 4 * parameters),
        "gradients zero": moved(1, 4 * parameters),
        "adamw step": moved(1, 28 * parameters),
    }
    projections = {"qkv": (HIDDEN, PACKED), "attention_output": (HIDDEN, HIDDEN)}
    projections |= {"gate_up": (HIDDEN, 2 * INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}
    for name, (inputs, outputs) in projections.items():
        times[f"{name} forward"] = matmul(blocks, TOKENS, outputs, inputs, 2)
        times[f"{name} dX"] = matmul(blocks, TOKENS, inputs, outputs, 2)
        times[f"{name} dW"] = matmul(blocks, outputs, inputs, TOKENS, 8)
    return times


@pytest.mark.parametrize("gpu", RATES)
def test_operations_take_what_their_sizes_need(workspace: Workspace, gpu: str) -> None:
    plan = planned(workspace, f"--gpu={gpu}")
    operations, expected = plan["operations"], seconds(gpu)
    assert {row["operation"]: row["seconds"] for row in operations["rows"]} == pytest.approx(expected, rel=1e-9)
    step = operations["step_seconds"]
    assert step == pytest.approx(sum(expected.values()), rel=1e-9)
    assert step == plan["speed"]["step_seconds"][1]
    tokens = MICRO_BATCHES * TOKENS
    assert operations["tokens_per_second"] == pytest.approx(tokens / step)
    assert operations["mfu"] == pytest.approx(tokens * plan["flops_per_token"] / step / RATES[gpu][0])


def test_rows_of_the_table_sum_to_its_last(workspace: Workspace) -> None:
    for words in ((), ("--ranks=4",), ("--override=optimizer.algorithm=muon",)):
        lines = table(workspace, "--gpu=rtx5090", *words).splitlines()
        assert all(len(line) <= 80 for line in lines)
        first = next(number for number, line in enumerate(lines) if line.startswith("operation "))
        rows, step, speed = lines[first + 1 : -2], lines[-2], lines[-1]
        assert step.startswith("step ")
        milliseconds = cell(step, 0)
        assert sum(cell(row, 3) for row in rows) == pytest.approx(milliseconds, abs=0.05 * len(rows))
        assert sum(cell(row, 4) for row in rows) == pytest.approx(100, abs=0.05 * len(rows))
        tokens = re.fullmatch(r"([\d,]+) tokens/s, MFU [\d.]+ %", speed)
        assert tokens is not None
        expected = MICRO_BATCHES * TOKENS / (milliseconds / 1e3)
        assert float(tokens[1].replace(",", "")) == pytest.approx(expected, rel=1e-3)
        assert any(row.startswith("exchange between ranks") for row in rows) == ("--ranks=4" in words)


def test_a_cpu_without_rates_is_refused(workspace: Workspace) -> None:
    words = ("--preset=smoke_cpu", "--override=runtime.device=cpu", "--memory=1MB", "--operations")
    workspace.orchestrate("plan", *words).refused(2, "--operations: no rates are known for", "--gpu rtx5090")


@pytest.mark.parametrize("gpu", RATES)
def test_the_decision_quotes_the_printed_table(workspace: Workspace, gpu: str) -> None:
    output = table(workspace, f"--gpu={gpu}")
    assert output in DECISION.read_text(), f"run plan --gpu {gpu} --operations"
