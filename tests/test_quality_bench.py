"""The quality bench: rows are valid configs, resume where they were stopped, and are compared correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import report
import rows
import run
from orchestrator import RunConfig
from quality import TINY, small_bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Bench:
    return small_bench(tmp_path, monkeypatch)


def test_every_row_is_a_valid_config(bench: run.Bench) -> None:
    known = list(run.known_rows().values())
    known += rows.after_sweep(rows.sweep("adamw")[2], rows.sweep("muon")[2])
    assert len({row.name for row in known}) == len(set(known))
    for row in known:
        RunConfig.load(run.HERE / f"{row.config}.yaml", overrides=bench.overrides(row))


def test_a_stopped_row_resumes_and_gets_a_result(bench: run.Bench) -> None:
    bench.train(TINY, 2)
    assert [step for step, *_ in bench.curve(TINY)] == [2]
    partial = bench.result("tiny")
    assert partial
    assert not partial["complete"]
    bench.train(TINY)
    result = json.loads((bench.results / "tiny.json").read_text())
    assert result["complete"]
    assert result["curve"][0][3] == partial["curve"][0][3]
    assert [step for step, *_ in result["curve"]] == [2, 4, 6]
    assert result["loss"] == bench.loss(TINY)
    assert result["bits_per_byte"] > 0
    assert result["text"] == bench.text
    assert "| tiny |" in report.table(report.load(bench.results))


def test_held_out_files_are_not_trained_on(bench: run.Bench) -> None:
    train, held_out = (
        {json.loads(line)["text"] for line in (bench.root / "text" / name).read_text().splitlines()}
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert len(train) + len(held_out) == 300
    assert held_out
    assert not train & held_out


def test_a_loss_counts_as_reached_when_it_stays_below() -> None:
    curve = [[1, 100, 1.0, 5.0], [2, 200, 2.0, 3.0], [3, 300, 3.0, 4.5], [4, 400, 4.0, 3.5]]
    result: dict[str, Any] = {"curve": curve}
    assert report.reached(result, 4.0) == (350.0, 3.5)
    assert report.reached(result, 3.4) is None
