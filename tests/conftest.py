"""Fixtures of the suite: a folder of its own for every test, and a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, write_fineweb
from workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A folder with runs, tokenizers and cache of its own, and no Hub."""
    return Workspace(tmp_path)


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the fake Hub serves: a small FineWeb, unless a module has another."""
    root = tmp_path_factory.mktemp("hub")
    write_fineweb(root)
    return root


@pytest.fixture
def hub(hub_root: Path) -> Iterator[FakeHub]:
    with FakeHub(hub_root) as hub:
        yield hub


@pytest.fixture
def hub_workspace(tmp_path: Path, hub: FakeHub) -> Workspace:
    """A workspace whose Hub is the fake one."""
    return Workspace(tmp_path, hub.environment(tmp_path / "hf"))
