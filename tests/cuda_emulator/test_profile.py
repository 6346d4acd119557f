"""Profiled steps on an emulated GPU: every operation on the stream's track, and the same weights as without."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from cuda_emulator.runs import Runs, Tiny

TINY = Tiny(precision="bf16", layers=2, steps=5, checkpoint_every=5)
TRAINER, GPU = 1, 2


@pytest.fixture
def trace(runs: Runs) -> dict[str, Any]:
    """The trace of steps 3 and 4 of the run `profiled`."""
    runs.write("profiled", TINY)
    runs.train("profiled", "--profile=3-4").succeeded()
    path = runs.workspace.run_folder("profiled") / "profile" / "trace-3-4.json"
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def complete(trace: dict[str, Any], process: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def inside(event: dict[str, Any], events: list[dict[str, Any]]) -> list[str]:
    """Return the names of the events around an event, outermost first."""
    start, end = event["ts"], event["ts"] + event["dur"]
    around = [e for e in events if e["cat"] == "scope" and e["ts"] <= start and end <= e["ts"] + e["dur"]]
    return [e["name"] for e in sorted(around, key=lambda e: (e["ts"], -e["dur"]))]


def test_every_operation_is_on_the_streams_track(trace: dict[str, Any]) -> None:
    launches, gpu_events = complete(trace, TRAINER), complete(trace, GPU)
    operations = [event for event in gpu_events if event["cat"] == "operation"]
    assert [e["name"] for e in launches if e["cat"] == "operation"] == [e["name"] for e in operations]
    # A stream computes one operation after the other.
    for one, other in itertools.pairwise(operations):
        assert one["ts"] + one["dur"] <= other["ts"], (one, other)
    matmuls = [inside(event, gpu_events) for event in operations if event["name"] == "linear::backward_weight"]
    assert ["micro_batch", "backward", "layer 1", "mlp backward", "down"] in matmuls
    assert ["micro_batch", "backward", "layer 0", "attention backward", "qkv"] in matmuls
    assert "one by one" in trace["otherData"]["operations"]


def test_profiled_steps_change_no_bit(runs: Runs, trace: dict[str, Any]) -> None:
    assert trace["otherData"]["steps"] == "3-4"
    runs.trained("plain", TINY)
    assert runs.steps("plain") == runs.steps("profiled")
    assert runs.state("plain", 5) == runs.state("profiled", 5)


def test_the_summary_has_the_nominal_roofline(runs: Runs) -> None:
    runs.write("muon", replace(TINY, algorithm="muon"))
    output = runs.train("muon", "--profile=3-3").succeeded().out
    assert "profile of step 3 on cuda:0 (NVIDIA GeForce RTX 5090)" in output
    assert "roofline: 209.5 TFLOP/s and 1.79 TB/s, the GPU's nominal rates" in output
    assert "launched one by one" in output
