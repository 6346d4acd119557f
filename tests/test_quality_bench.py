"""The quality bench: rows are valid configs, resume where they were stopped, and are compared correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import precision
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
    all_rows = list(bench.known_rows().values())
    assert len({row.name for row in all_rows}) == len(set(all_rows))
    for row in all_rows:
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
    assert "| tiny |" in report.table(report.load(bench.results), [])


def test_a_sweep_keeps_the_better_half_until_one_row_wins_by_its_mean_loss(bench: run.Bench) -> None:
    bench.results.mkdir()
    sweep_rows = rows.contenders()
    for number, row in enumerate(sweep_rows["adamw"]):
        for seed in row.seeds():
            # The last of the finalists has the lowest loss with the first seed, but not on average.
            loss = 3.0 + number / 100 + (0.2 * (seed.seed - 22) if number == 5 else 0.0)
            curve = [[row.steps // 4, 1, 1.0, 4.0 - number / 100], [row.steps, 2, 2.0, loss]]
            (bench.results / f"{seed.name}.json").write_text(json.dumps({"text": bench.text, "curve": curve}))
    assert [row.name for row in bench.finalists(sweep_rows["adamw"])] == [f"10m-adamw-0.00{rate}" for rate in (5, 3, 2)]
    assert bench.winner(sweep_rows["adamw"]).name == "10m-adamw-0.002"
    assert "10m-muon-0.005-half-recipe-polar-express-seed23" in bench.known_rows()


def test_rows_are_trained_side_by_side(bench: run.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    longer = [row.changed("longer", "scheduler.total_steps=8") for row in TINY.seeds()]
    bench.train_all(longer, jobs=2, to_quarter=True)
    assert [bench.curve(row)[-1][0] for row in longer] == [2, 2, 2]
    bench.train_all(TINY.seeds(), jobs=2)
    losses = [bench.loss(row) for row in TINY.seeds()]
    assert len(set(losses)) == 3
    assert capsys.readouterr().out.splitlines()[-1] == f"{'tiny-seed23':<44} {losses[2]:.4f}"
    broken = TINY.changed("broken", "model.num_attention_heads=5")
    with pytest.raises(SystemExit, match=r"tiny-broken ended with exit code 2: .*num_attention_heads"):
        bench.train_all([broken])


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
    curve = [(1, 100.0, 5.0), (2, 200.0, 3.0), (3, 300.0, 4.5), (4, 400.0, 3.5)]
    assert report.reached(curve, 4.0) == 350.0
    assert report.reached(curve, 3.4) is None


def test_means_over_seeds_are_compared_by_the_times_of_each_machine() -> None:
    def result(name: str, seed: int, curve: list[list[float]]) -> tuple[str, dict[str, Any]]:
        row = f"10m-{name}" + f"-seed{seed}" * (seed > 1)
        algorithm = f"optimizer.algorithm={name.partition('-')[0]}"
        return row, {"row": row, "config": "10m", "overrides": [algorithm], "curve": curve}

    results = dict(
        [
            result("adamw-0.001", 1, [[1, 100, 9.0, 5.0], [2, 200, 9.9, 3.1]]),
            result("adamw-0.001", 2, [[1, 100, 9.0, 5.0], [2, 200, 9.9, 2.9]]),
            # Lower, but of one seed.
            result("adamw-0.002", 1, [[1, 100, 9.0, 5.0], [2, 200, 9.9, 2.0]]),
            result("muon-0.003", 1, [[1, 100, 1.0, 3.2], [2, 200, 2.0, 2.5]]),
            result("muon-0.003", 2, [[1, 100, 1.0, 2.8], [2, 200, 2.0, 2.5]]),
        ]
    )
    speeds = [
        {"machine": "a CPU", "10m-adamw": 0.01, "10m-muon": 0.012},
        {"machine": "a GPU", "10m-adamw": 0.001, "10m-muon": 0.002},
    ]
    plain = report.REFERENCES["AdamW tuned by its rate"]
    assert report.compare(results, speeds, report.REFERENCES["AdamW with a recipe of its own"]) == ""
    lines = report.compare(results, speeds, plain).splitlines()
    assert lines[0] == "| to 10m-adamw-0.001's 3.0000 | of its tokens | of its seconds, a CPU | of its seconds, a GPU |"
    assert lines[2:] == ["| 10m-adamw-0.001 | 1.00 | 1.00 | 1.00 |", "| 10m-muon-0.003 | 0.50 | 0.60 | 1.00 |"]


def test_fp8_is_compared_with_bf16_by_pairs_of_seeds() -> None:
    compared = precision.compare([3.0, 2.0, 4.0, 3.0], [3.01, 2.03, 4.0, 3.04], [2.9, 1.9])
    assert compared.pairs == 4
    assert compared.mean == pytest.approx(0.02)
    assert compared.standard_error == pytest.approx(0.0182574 / 2, rel=1e-4)
    assert compared.upper_bound == pytest.approx(0.02 + 1.96 * 0.0091287, rel=1e-4)
    # A quarter more tokens gain 0.1 nats: 0.02 are a fifth of that.
    assert compared.tokens_for_equal_loss == pytest.approx(1.25**0.2)
    assert precision.compare([3.0], [3.1], []).standard_error == float("inf")
    assert precision.compare([3.0, 3.0], [3.1, 3.1], [3.0]).tokens_for_equal_loss is None


def test_the_runs_of_a_pair_differ_in_their_precision_alone(bench: run.Bench) -> None:
    pair = precision.rows_of(TINY, 7)
    for row in pair.values():
        bench.train(row)
    losses = {name: bench.loss(row) for name, row in pair.items()}
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], abs=0.05)
    assert pair["longer"].value("scheduler.total_steps") == "8"
    overrides = {name: set(bench.overrides(row)) for name, row in pair.items()}
    assert overrides["fp8"] ^ overrides["bf16"] == {"runtime.precision=fp8", "runtime.precision=bf16"}
    assert "runtime.seed=7" in overrides["fp8"]


def test_rows_are_grouped_by_all_but_the_seed() -> None:
    names = ["10m-adamw-0.001", "10m-adamw-0.001-seed22", "10m-adamw-0.001-pytorch", "10m-adamw-0.001-seed22-pytorch"]
    groups = report.groups({name: {"row": name} for name in names})
    assert {name: len(seeds) for name, seeds in groups.items()} == {"10m-adamw-0.001": 2, "10m-adamw-0.001-pytorch": 2}


def test_changes_of_a_recipe_are_compared_by_pairs_of_seeds() -> None:
    losses = {
        "m-recipe": 2.0, "m-recipe-seed22": 3.0, "m-recipe-seed23": 9.0, "m-recipe-min-lr": 2.5,
        "m-recipe-min-lr-seed22": 3.7, "m-recipe-min-lr-seed24": 9.0,
    }  # fmt: skip
    lines = report.effects({name: {"row": name, "loss": loss} for name, loss in losses.items()}).splitlines()
    assert lines[2:] == ["| m-recipe | min-lr | 2 | +0.600 | 0.100 |"]


def test_the_leaderboard_shows_the_results() -> None:
    document = (REPOSITORY / "docs" / "leaderboard.md").read_text()
    tables = "\n\n".join(report.sections(report.load(run.RESULTS), report.load_speeds(run.RESULTS)))
    assert document == report.rewrite(document, tables), "run benches/quality/report.py --write docs/leaderboard.md"
