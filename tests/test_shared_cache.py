"""Data that was read once is read from this machine's disk afterwards: by a second epoch, by runs side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fake_hub import FakeHub
from killing import KilledRun, prepare
from workspace import Workspace

DATASET, SAMPLES = "HuggingFaceFW/fineweb", 150


def content_requests(hub: FakeHub) -> int:
    return sum(".parquet" in request.path for request in hub.requests)


def test_a_second_epoch_and_a_second_run_ask_for_no_content(hub_workspace: Workspace, hub: FakeHub) -> None:
    one_epoch, two_epochs = prepare(hub_workspace, DATASET, SAMPLES, "once", "twice")
    for run, epochs in ((one_epoch, 1), (two_epochs, 2)):
        config = run.folder / "training.yaml"
        config.write_text(config.read_text().replace("cache_limit: 1B", "").replace("epochs: 1", f"epochs: {epochs}"))
    hub.requests.clear()
    assert not one_epoch.live()
    assert content_requests(hub) > 0
    hub.requests.clear()
    assert not two_epochs.live()
    assert content_requests(hub) == 0
    assert [epoch["finished"] for epoch in two_epochs.proof()["components"][0]["epochs"]] == [True, True]


def test_runs_side_by_side_share_a_small_cache(hub_workspace: Workspace, hub: FakeHub) -> None:
    names = ("alone", "left", "middle", "right")
    first_run, *neighbours = prepare(hub_workspace, DATASET, SAMPLES, *names)
    for run in neighbours:
        config = run.folder / "training.yaml"
        config.write_text(config.read_text().replace("cache_limit: 1B", "cache_limit: 2MiB"))
    assert not first_run.live()
    with ThreadPoolExecutor() as threads:
        assert not any(threads.map(KilledRun.live, neighbours))
    for run in neighbours:
        assert run.results() == first_run.results()
        assert run.proof()["problems"] == []
    blocks = [path for path in (hub_workspace.root / "cache/blocks").rglob("*") if path.is_file()]
    assert blocks
    assert not any(path.suffix == ".part" for path in blocks)
    assert sum(path.stat().st_size for path in blocks) <= 2 << 20
