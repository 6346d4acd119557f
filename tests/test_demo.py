"""`make demo` in small: the text that every machine has, streamed like a data set of the Hub."""

from __future__ import annotations

import json

import pytest
from workspace import TINY_MODEL, Workspace


@pytest.mark.slow
def test_the_demo_trains_and_prints_a_summary(workspace: Workspace) -> None:
    flags = [*TINY_MODEL, "--stream", "--dataset=demo", "--experiment=demo", "--steps=12", "--seq-len=64"]
    out = workspace.orchestrate(*flags).succeeded().out
    shards = sorted((workspace.root / "cache" / "demo").glob("*.parquet"))
    assert len(shards) > 1
    write_times = [path.stat().st_mtime_ns for path in shards]
    streaming = json.loads((workspace.run_folder("demo") / "streaming_config.json").read_text())
    assert streaming["dataset"] == "demo"
    for words in ("unigram entropy", "A sample", "Where it is", "What to type next"):
        assert words in out
    (evaluation,) = workspace.metrics("demo", "evaluation")
    assert f"{evaluation['loss']:.3f}" in out
    second_run = [*TINY_MODEL, "--stream", "--dataset=demo", "--experiment=again", "--launch=none"]
    workspace.orchestrate(*second_run).succeeded()
    assert [path.stat().st_mtime_ns for path in shards] == write_times
