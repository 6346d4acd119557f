"""Fixtures of the suite: a folder of its own for every test, and a Hub on loopback.

Programs that tests start have the signals' usual effects, whatever the suite itself was started with.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, write_fineweb
from workspace import Workspace


def pytest_configure() -> None:
    """Ignore by handlers what `nohup` and a background job ignore.

    A handler ends with the process's image, while an ignored signal stays ignored in every program that it starts.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seeds of tests that take a random sample, from every process that runs tests."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    called = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    seeds = {str(value) for report in called for name, value in report.user_properties if name == "seed"}
    for seed in sorted(seeds):
        terminalreporter.write_line(seed)


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
