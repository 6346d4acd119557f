"""The fake Hub is worth testing against only if the real clients take it for the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Repository, write_fineweb

FINEWEB = "HuggingFaceFW/fineweb"

READ_WITH_DATASETS = """
import json, os, sys
from datasets import load_dataset
stream = load_dataset("HuggingFaceFW/fineweb", name=sys.argv[1], split="train", streaming=True)
rows = list(stream.take(300))
print(json.dumps({"columns": sorted(rows[0]), "texts": [row["text"] for row in rows]}), flush=True)
os._exit(0)  # the client's prefetching threads can abort an interpreter that ends in the usual way
"""

LIST_WITH_HUGGINGFACE_HUB = """
import json
from huggingface_hub import HfApi, hf_hub_download
api = HfApi()
info = api.dataset_info("HuggingFaceFW/fineweb")
files = [entry.path for entry in api.list_repo_tree("HuggingFaceFW/fineweb", repo_type="dataset", recursive=True)]
path = hf_hub_download("HuggingFaceFW/fineweb", "sample/10BT/000_00000.parquet", repo_type="dataset")
print(json.dumps({"sha": info.sha, "files": files, "downloaded": path}))
"""


def run_client(script: str, hub: FakeHub, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run a client in a process of its own, since the clients read the endpoint when they are imported."""
    environment = {**os.environ, **hub.environment(cache)}
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    answer = json.loads(process.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def fineweb(tmp_path: Path) -> Path:
    write_fineweb(tmp_path / "hub")
    return tmp_path / "hub"


def test_datasets_streams_a_config_across_its_files(fineweb: Path, tmp_path: Path) -> None:
    with FakeHub(fineweb) as hub:
        read = run_client(READ_WITH_DATASETS, hub, tmp_path / "cache", "sample-10BT")
    texts = read["texts"]
    assert isinstance(texts, list)
    assert len(texts) == 300  # more than the 240 of its first file
    assert {"text", "id", "dump", "language_score", "token_count"} <= set(read["columns"])


def test_huggingface_hub_pages_lists_and_downloads_with_a_token(fineweb: Path, tmp_path: Path) -> None:
    with FakeHub(fineweb, token="hf_canary", page_size=3) as hub:
        listing = run_client(LIST_WITH_HUGGINGFACE_HUB, hub, tmp_path / "cache")
        requests = list(hub.requests)
    repository = Repository(fineweb, "datasets", FINEWEB)
    assert listing["sha"] == repository.commit()
    assert set(repository.files()) <= set(listing["files"])
    downloaded = Path(str(listing["downloaded"])).read_bytes()
    assert downloaded == (repository.folder / "sample/10BT/000_00000.parquet").read_bytes()
    signed = [request for request in requests if request.path.startswith("/cdn/")]
    assert signed
    assert all(request.authorization is None for request in signed)


def test_datasets_survives_a_server_error(fineweb: Path, tmp_path: Path) -> None:
    with FakeHub(fineweb) as hub:
        hub.faults.add("/cdn/", "503", count=1)
        read = run_client(READ_WITH_DATASETS, hub, tmp_path / "cache", "CC-MAIN-2013-20")
        faults = [request.fault for request in hub.requests if request.fault]
    assert len(read["texts"]) == 300
    assert faults == ["503"]
