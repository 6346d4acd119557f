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
from workspace import REPOSITORY


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Bench:
    return small_bench(tmp_path, monkeypatch)


def test_every_row_is_a_valid_config(bench: run.Bench) -> None:
    known = list(bench.known_rows().values())
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
    assert "| tiny |" in report.table(report.load(bench.results), {})


def test_a_sweep_keeps_the_better_half_until_one_row_wins(bench: run.Bench) -> None:
    bench.results.mkdir()
    for algorithm in rows.RATES:
        for number, row in enumerate(rows.sweep(algorithm)):
            curve = [[rows.QUARTER, 1, 1.0, 4.0 - number / 100], [rows.STEPS, 2, 2.0, 3.0 + number / 100]]
            (bench.results / f"{row.name}.json").write_text(json.dumps({"text": bench.text, "curve": curve}))
    assert [row.name for row in bench.finalists()[0]] == ["10m-adamw-0.008", "10m-adamw-0.005", "10m-adamw-0.003"]
    winners = [row.name for row in bench.winners()]
    assert winners == ["10m-adamw-0.003", "10m-muon-0.005"]
    assert f"{winners[1]}-quarter-recipe-polar-express" in bench.known_rows()


def test_an_unknown_row_is_told_with_near_ones(bench: run.Bench) -> None:
    with pytest.raises(SystemExit, match=r"no such row: 10m-muon-0\.003-half-recip\. .*10m-muon-0\.003-half-recipe"):
        bench.row("10m-muon-0.003-half-recip")


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
    assert report.reached(result, 4.0) == 350.0
    assert report.reached(result, 3.4) is None


def test_seconds_come_from_one_measurement_of_both_optimizers() -> None:
    def result(algorithm: str, curve: list[list[float]]) -> dict[str, Any]:
        *_, (_, tokens, seconds, loss) = curve
        return {
            "row": f"10m-{algorithm}", "config": "10m", "overrides": [f"optimizer.algorithm={algorithm}"],
            "curve": curve, "tokens": tokens, "seconds": seconds, "loss": loss,
        }  # fmt: skip

    results = {
        "10m-adamw": result("adamw", [[1, 100, 9.0, 5.0], [2, 200, 9.9, 3.0]]),
        "10m-muon": result("muon", [[1, 100, 1.0, 3.0], [2, 200, 2.0, 2.5]]),
    }
    lines = report.compare(results, {"10m-adamw": 0.01, "10m-muon": 0.012}).splitlines()
    assert lines[2:] == ["| 10m-adamw | 1.00 | 1.00 |", "| 10m-muon | 0.50 | 0.60 |"]


def test_the_leaderboard_shows_the_results() -> None:
    document = (REPOSITORY / "docs" / "leaderboard.md").read_text()
    tables = "\n\n".join(report.sections(report.load(run.RESULTS), report.load_speed(run.RESULTS)))
    assert document == report.rewrite(document, tables), "run benches/quality/report.py --write docs/leaderboard.md"
