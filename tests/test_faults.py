"""Killed again and again while the Hub fails in every way, a run ends where one ends that was left alone."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import KINDS, FakeHub, Kind
from fake_hub.fineweb import documents
from killing import KilledRun, prepare
from workspace import TRAINER, Workspace

DATASET = "owner/texts"
FILES, GROUPS, GROUP_ROWS = 8, 6, 10
# What is left of the last group is held out.
SAMPLES = FILES * GROUPS * GROUP_ROWS - 5
KILLS = 40
FAULTS_OF_A_KIND, LAST_CORRUPT = 9, 3
# Moments of a life at most: up to sixty pass before the first step while much fails.
# The cursor holds the held-out split: a resume makes 27 to 29 requests up to its first batch here, and 47 to 54 if it
# has to decide the split again.
LONGEST_LIFE = 70

CONTENT, ANSWERS_WITH_A_BODY, ANYTHING, REDIRECTS = r"^/cdn/", r"^/(cdn|api)/", "", r"/resolve/.*\.parquet"
PLACES: dict[Kind, str] = {
    "500": ANYTHING, "502": ANYTHING, "503": ANYTHING, "429": ANYTHING, "rate_limit": ANYTHING,
    "truncate": ANSWERS_WITH_A_BODY, "reset": ANSWERS_WITH_A_BODY, "stall": ANSWERS_WITH_A_BODY,
    "no_range": CONTENT, "wrong_content_range": CONTENT, "short_file": CONTENT, "corrupt": CONTENT, "expired": CONTENT,
    "unresolved": REDIRECTS,
}  # fmt: skip
# The faults of the Hub that a proxy passes on; the others the proxy has to notice itself.
PROXIED: tuple[Kind, ...] = ("429", "rate_limit", "500", "502", "503", "truncate", "reset")


@pytest.fixture(scope="module")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of Parquet files with checksums of their pages."""
    root = tmp_path_factory.mktemp("hub")
    texts = documents(mean_characters=300)
    for number in range(FILES):
        path = root / "datasets" / DATASET / f"data/train-{number:05}-of-{FILES:05}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": [next(texts) for _ in range(GROUPS * GROUP_ROWS)]})
        pq.write_table(table, path, row_group_size=GROUP_ROWS, use_dictionary=False, write_page_checksum=True)
    return root


@pytest.fixture
def proxy(hub: FakeHub, tmp_path: Path) -> Iterator[str]:
    """The address of olah, a caching proxy of the Hub that was not written for us, in front of the fake Hub."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hub_address, address = f"127.0.0.1:{hub.port}", f"127.0.0.1:{port}"
    flags = (f"--host=127.0.0.1 --port={port} --hf-scheme=http --hf-netloc={hub_address} --hf-lfs-netloc={hub_address} "
             f"--mirror-netloc={address} --mirror-lfs-netloc={address} --repos-path={tmp_path}/repos "
             f"--log-path={tmp_path}/logs").split()  # fmt: skip
    command = [str(Path(sys.executable).parent / "olah-cli"), *flags]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    assert any("Uvicorn running" in line for line in process.stdout), "olah serves"
    drain = threading.Thread(target=process.stdout.read)
    drain.start()
    yield f"http://{address}"
    process.terminate()
    process.wait(timeout=60)
    drain.join()


def add_faults(hub: FakeHub, chance: random.Random) -> None:
    """Add every kind of fault, in random order, with correct answers between them."""
    kinds = [kind for kind in KINDS for _ in range(FAULTS_OF_A_KIND)]
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds):
        hub.faults.add(PLACES[kind], kind, retry_after=int(number % 8 == 0), skip=chance.randint(0, 8))


def starved(workspace: Workspace, hub: FakeHub, kind: Kind, retry_after: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start a run whose Hub fails once it trains; return it and the first line that it prints about that."""
    (run,) = prepare(workspace, DATASET, SAMPLES, "starved")
    process = workspace.start(TRAINER, "train", "--config", run.folder / "training.yaml")
    assert process.stdout
    assert any(line.startswith("training ") for line in process.stdout)
    hub.faults.add(ANYTHING, kind, count=10_000, retry_after=retry_after)
    return process, next(line for line in process.stdout if line.startswith("waiting for the Hub"))


def used_rows(run: KilledRun) -> Counter[tuple[int, int, int]]:
    """Return how often the ledger names each row, as (file, group, row)."""
    rows: Counter[tuple[int, int, int]] = Counter()
    for record in map(json.loads, (run.folder / "ledger.jsonl").read_text().splitlines()):
        for piece in record.get("pieces", []):
            rows.update((piece["file"], piece["group"], piece["row"] + i) for i in range(piece["rows"]))
    return rows


def assert_used_once(run: KilledRun) -> None:
    """Check that every document of the epoch was trained on exactly once, by validate-data and by our own count."""
    proof = run.proof()
    assert proof["problems"] == []
    (epoch,) = proof["components"][0]["epochs"]
    assert epoch["finished"]
    assert epoch["whole"]
    rows = used_rows(run)
    assert set(rows.values()) == {1}
    assert len(rows) == epoch["documents"] == SAMPLES


@pytest.mark.slow
def test_forty_kills_and_a_hundred_faults_change_no_byte(hub_workspace: Workspace, hub: FakeHub) -> None:
    # A stalled connection is given up after a second, so that the test needs no patience.
    hub_workspace.extra_environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
    single_run, killed_run = prepare(hub_workspace, DATASET, SAMPLES, "alone", "killed")
    assert not single_run.live()

    chance = random.Random(7)
    hub.requests.clear()
    add_faults(hub, chance)
    killed_run.watch(hub)
    for number in range(KILLS):
        assert killed_run.live(chance.randint(1, LONGEST_LIFE)), f"done after {number} kills"
    # A kill may come before wrong bytes are looked at; the last life lasts. It opens every file first, for its footer.
    hub.faults.add(CONTENT, "corrupt", count=LAST_CORRUPT, skip=FILES)
    killed_run.lines.clear()
    assert not killed_run.live()

    served = Counter(request.fault for request in hub.requests if request.fault)
    assert served == {**dict.fromkeys(KINDS, FAULTS_OF_A_KIND), "corrupt": FAULTS_OF_A_KIND + LAST_CORRUPT}
    assert served.total() >= 100
    assert any("is corrupted" in line for line in killed_run.lines), "wrong bytes were noticed"
    assert killed_run.results() == single_run.results()
    assert_used_once(killed_run)


@pytest.mark.slow
def test_kills_and_faults_through_a_proxy_change_no_byte(hub_workspace: Workspace, hub: FakeHub, proxy: str) -> None:
    single_run, killed_run = prepare(hub_workspace, DATASET, SAMPLES, "alone", "killed")
    assert not single_run.live()

    hub_workspace.extra_environment |= {"HF_ENDPOINT": proxy, "HF_HUB_DOWNLOAD_TIMEOUT": "3"}
    chance = random.Random(7)
    hub.requests.clear()
    for kind in PROXIED:
        hub.faults.add(PLACES[kind], kind, skip=chance.randint(2, 6))
    killed_run.watch(hub)
    for number in range(KILLS // 4):
        assert killed_run.live(chance.randint(1, LONGEST_LIFE)), f"done after {number} kills"
    assert not killed_run.live()

    assert all("olah" in request.user_agent or "python" in request.user_agent for request in hub.requests)
    assert Counter(request.fault for request in hub.requests if request.fault) == dict.fromkeys(PROXIED, 1)
    assert killed_run.results() == single_run.results()
    hub_workspace.extra_environment["HF_ENDPOINT"] = hub.endpoint
    assert_used_once(killed_run)


def test_training_says_what_it_waits_for_and_continues(hub_workspace: Workspace, hub: FakeHub) -> None:
    process, message = starved(hub_workspace, hub, "503")
    assert "it answered 503" in message
    assert ".parquet" in message
    assert "Signature" not in message
    hub.faults.clear()
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0, rest
    assert "data resumed after" in rest
    assert rest.count("\nwaiting for the Hub") <= 1, "not a line for each attempt"


def test_training_reports_hub_rate_limits_and_can_be_stopped(hub_workspace: Workspace, hub: FakeHub) -> None:
    process, message = starved(hub_workspace, hub, "429", retry_after=200)
    match = re.search(r"it answered 429 Too Many Requests; retrying in (\d+) s$", message)
    assert match
    assert 100 < int(match[1]) <= 200
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, rest
