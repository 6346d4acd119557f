"""metrics.jsonl is read as it grows, whatever a run, a resume or a disk leaves in it."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
from orchestrator.watch import metrics_file
from orchestrator.watch.metrics_file import MAX_POINTS, WINDOW, Metrics, MetricsFile
from watched_runs import as_lines, train_row, train_rows

ALL = 1 << 40


def read(path: Path, budget: int = ALL) -> Metrics:
    file = MetricsFile()
    file.read(path, budget)
    while file.has_more:
        file.read(path, budget)
    return file.metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("seed", range(5))
def test_a_file_read_in_pieces_gives_what_one_read_gives(path: Path, seed: int) -> None:
    text = as_lines(train_rows(400, everything=True)).encode()
    path.write_bytes(text)
    whole = read(path)
    grown, chance = MetricsFile(), random.Random(seed)
    path.write_bytes(b"")
    for start, end in zip(cuts := sorted({0, len(text), *chance.sample(range(len(text)), 40)}), cuts[1:], strict=False):
        with path.open("ab") as file:
            file.write(text[start:end])
        grown.read(path, ALL)
    assert grown.metrics == whole
    assert read(path, 1000) == whole


def test_a_torn_last_line_waits_for_its_end(path: Path) -> None:
    lines = as_lines(train_rows(3)).encode()
    file = MetricsFile()
    for length in range(len(lines) // 3 * 2, len(lines) + 1):
        path.write_bytes(lines[:length])
        file.read(path, ALL)
        assert file.metrics.damaged == 0
        assert file.metrics.step == lines[:length].count(b"\n")


def test_a_resume_that_rewinds_the_file_is_noticed(path: Path) -> None:
    path.write_text(as_lines(train_rows(20)))
    file = MetricsFile()
    file.read(path, ALL)
    resumed_rows = [*train_rows(12), *(train_row(step, loss=9.0) for step in range(13, 40))]
    for rows in (resumed_rows[:12], resumed_rows[:20], resumed_rows):
        replacement = path.with_name("staged")
        replacement.write_text(as_lines(rows))
        replacement.replace(path)
        file.read(path, ALL)
        assert [row["loss"] for row in file.metrics.recent] == [row["loss"] for row in rows]
    path.write_text(as_lines(train_rows(2)))
    file.read(path, ALL)
    assert file.metrics.step == 2


def test_a_removed_file_is_an_empty_one(path: Path) -> None:
    path.write_text(as_lines(train_rows(5)))
    file = MetricsFile()
    file.read(path, ALL)
    path.unlink()
    file.read(path, ALL)
    assert file.metrics == Metrics()


@pytest.mark.parametrize(
    "bad_line",
    [b"\x00\xff\xfe garbage", b"{}", b"[1]", b'"kind"', b'{"kind":"train"}', b'{"kind":"train","step":-1}',
     b'{"kind":"train","step":true}', b'{"kind":1,"step":1}', b'{"kind":"train","step":1', b"[" * 100_000,
     b'{"kind":"train","step":' + b"9" * 5000 + b"}"],
    ids=lambda line: repr(line[:30]),
)  # fmt: skip
def test_a_damaged_line_is_counted_and_left_out(path: Path, bad_line: bytes) -> None:
    before, after = train_rows(2), [train_row(3)]
    path.write_bytes(as_lines(before).encode() + bad_line + b"\n\n" + as_lines(after).encode())
    metrics = read(path)
    assert (metrics.damaged, metrics.lines, metrics.step) == (1, 3, 3)


@pytest.mark.parametrize("value", [None, "high", [1], True, float("nan"), float("inf"), 10**400])
def test_a_number_that_is_none_has_no_point(path: Path, value: object) -> None:
    path.write_text(
        as_lines([train_row(1), train_row(2, loss=value), {"kind": "evaluation", "step": 2, "loss": value}])
    )
    metrics = read(path)
    assert [point.loss is None for point in metrics.train.points] == [False, True]
    assert metrics.best is None


def test_a_line_without_end_takes_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "MAX_LINE", 1000)
    path.write_bytes(as_lines(train_rows(1)).encode() + b"x" * 50_000 + b"\n" + as_lines([train_row(2)]).encode())
    metrics = read(path, budget=700)
    assert (metrics.damaged, metrics.lines, metrics.step) == (1, 2, 2)


def test_a_long_file_keeps_its_shape_and_its_newest_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 40 * MAX_POINTS
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(f'{{"kind":"train","step":{step},"loss":{step}.5,"grad_norm":1.0}}\n')
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "evaluation", "step": step, "loss": abs(step - 50_000)}) + "\n")
                file.write(f'{{"kind":"utilization","step":{step},"cpu_cores":1.5}}\n')
    monkeypatch.setattr(metrics_file, "PIECE", 1 << 20)
    metrics = read(path)
    assert metrics.lines == steps + 2 * (steps // 1000)
    assert [row["step"] for row in metrics.recent] == list(range(steps - WINDOW + 1, steps + 1))
    points = metrics.train.points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert all(point.loss == point.step + 0.5 for point in points)
    gaps = {later.step - point.step for point, later in itertools.pairwise(points)}
    assert points[0].step == 1
    assert metrics.train_points()[-1].step == steps
    assert max(gaps) <= 64
    assert len(metrics.evaluations.points) == steps // 1000
    assert metrics.best is not None
    assert metrics.best["step"] == 50_000
    assert metrics.utilization[-1]["step"] == steps // 1000 * 1000


def test_a_later_line_supersedes_an_end(path: Path) -> None:
    end = {"kind": "end", "step": 3, "reason": "stopped by SIGINT"}
    path.write_text(as_lines([*train_rows(3), end]))
    assert read(path).end == end
    path.write_text(as_lines([*train_rows(3), end, train_row(4)]))
    assert read(path).end is None


def test_a_pipe_in_place_of_the_file_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="a named pipe"):
        read(path)
