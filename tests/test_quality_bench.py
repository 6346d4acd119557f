"""The quality bench: rows are valid configs, resume where they were stopped, and are compared correctly."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from orchestrator import RunConfig
from workspace import REPOSITORY, TRAINER

sys.path.insert(0, str(REPOSITORY / "benches" / "quality"))

import report
import rows
import run
from fake_hub.fineweb import documents
from rows import Row

TINY = (
    "model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=1", "model.num_attention_heads=2",
    "data.sequence_length=32", "data.sequences_per_step=4", "scheduler.total_steps=6", "scheduler.warmup_steps=1",
    "runtime.evaluation.every_n_steps=2", "runtime.checkpoint.every_n_steps=2", "runtime.evaluation.max_batches=1",
)  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Bench:
    texts = list(documents())[:300]
    packages = tmp_path / "packages"
    for index, content in enumerate(texts):
        path = packages / "library" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(packages))
    monkeypatch.setattr(run, "VOCABULARY", 384)
    return run.Bench(tmp_path / "bench", TRAINER)


def test_every_row_is_a_valid_config(bench: run.Bench) -> None:
    known = list(run.known_rows().values())
    known += rows.after_sweep(rows.sweep("adamw")[2], rows.sweep("muon")[2])
    assert len({row.name for row in known}) == len(set(known))
    for row in known:
        overrides = [flag.removeprefix("--override=") for flag in bench.overrides(row)]
        RunConfig.load(str(run.HERE / f"{row.config}.yaml"), overrides=overrides)


def test_a_stopped_row_resumes_and_gets_a_result(bench: run.Bench) -> None:
    row = Row("tiny", "10m", TINY)
    bench.train(row, 2)
    assert [step for step, *_ in bench.curve(row)] == [2]
    bench.train(row)
    result = json.loads((bench.root / "results" / "tiny.json").read_text())
    assert [step for step, *_ in result["curve"]] == [2, 4, 6]
    assert result["loss"] == bench.loss(row)
    assert result["bits_per_byte"] > 0
    assert result["text"] == bench.text
    assert "| tiny |" in report.table(report.load(bench.root))


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
