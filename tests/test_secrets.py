"""Whatever fails, only the Hub sees the token: no CDN, log, file, error or list of processes does."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from fake_hub import FakeHub, Kind
from orchestrator.urls import redacted
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Finished, Workspace

CANARY = "hf_CANARYabcdefghijklmnopqrstuvwxyz0123"
STREAM = [*TINY_MODEL, "--stream", "--max-samples=200", "--steps=4", "--checkpoint-every=2"]
# Everything that those who speak with the Hub have to say.
LOG = "warn,dataset=trace,training=trace,ureq=trace,ureq_proto=trace"
IMPATIENT = "data.network_patience=1s"


@pytest.fixture(params=["environment", "file"])
def private_hub(request: pytest.FixtureRequest, hub_root: Path, tmp_path: Path) -> Iterator[tuple[FakeHub, Workspace]]:
    """A Hub whose data sets need the token, and a workspace that has it in HF_TOKEN or in its usual file."""
    with FakeHub(hub_root, token=CANARY) as hub:
        home = tmp_path / "hf"
        environment = {**hub.environment(home), "RUST_LOG": LOG}
        if request.param == "file":
            del environment["HF_TOKEN"]
            home.mkdir()
            (home / "token").write_text(CANARY + "\n")
        yield hub, Workspace(tmp_path, environment)


def secret(process: Finished) -> Finished:
    """Check that a program did not print the token, and return it."""
    assert CANARY not in process.out + process.err
    return process


def assert_kept(workspace: Workspace, hub: FakeHub) -> None:
    """Check that the token is in no file but its own, and went to no host but the endpoint's."""
    files = [path for path in workspace.root.rglob("*") if path.is_file() and path != workspace.root / "hf/token"]
    assert len(files) > 5
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    own = hub.endpoint.removeprefix("http://")
    assert {request.host for request in hub.requests if request.authorization} == {own}
    elsewhere = [request for request in hub.requests if request.host != own]
    assert elsewhere, "content comes from another host"
    assert not any(CANARY in f"{request.path}{request.user_agent}" for request in hub.requests)


def family(first: Popen[str]) -> list[Path]:
    """Return the folders in /proc of a program and all that it started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = [first.pid]
    for pid in pids:
        pids += children.get(pid, [])
    return [Path("/proc") / str(pid) for pid in pids]


@pytest.mark.parametrize("address", [f"http://user:{CANARY}@127.0.0.1:9", f"http://127.0.0.1:9/hub?key={CANARY}"])
def test_no_message_tells_what_an_address_holds(workspace: Workspace, address: str) -> None:
    run = [*TINY_MODEL, "--stream", "--dataset=a/b", "--experiment=E", "--steps=3"]
    workspace.orchestrate(*TINY_MODEL, f"--input={workspace.write_text()}", "--experiment=M", "--steps=3").succeeded()
    for variable in ("HF_ENDPOINT", "HTTP_PROXY"):
        elsewhere = {"HF_ENDPOINT": "http://10.0.0.1:9", variable: address, "HF_TOKEN": "hf_x"}
        there = Workspace(workspace.root, elsewhere)
        for command in (
            ["doctor", "--json"], ["push", "alice/tiny", "--experiment=M"],
            ["finetune", "--model=alice/tiny", "--input=book.txt"], [*run, "--override=data.network_patience=0s"],
        ):  # fmt: skip
            process = secret(there.orchestrate(*command))
            assert "127.0.0.1:9" in process.out + process.err, (command, process)


def test_urls_in_texts_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://me:p a'ss@hub.example/")
    text = "403 for (https://store.example/x?X-Amz-Signature=5#a), HTTP://u:p@h:1/p; https://me:p a'ss@hub.example/api."
    assert redacted(text) == "403 for (https://store.example/x), HTTP://h:1/p; https://hub.example/api."


@pytest.mark.slow
def test_runs_that_fail_do_not_tell_the_token(private_hub: tuple[FakeHub, Workspace]) -> None:
    hub, workspace = private_hub
    secret(workspace.orchestrate(*STREAM, "--experiment=made")).succeeded()
    run = workspace.run_folder("made")
    resume = ("train", "--config", run / "training.yaml", "--resume", "--override", "scheduler.total_steps=50")

    hub.gated = True
    secret(workspace.orchestrate(*STREAM, "--experiment=gated")).refused(3, "403", "conditions")
    hub.gated = False
    secret(workspace.orchestrate(*STREAM, "--dataset=owner/none", "--experiment=none")).refused(3, "404")
    hub.token = "hf_another"
    secret(workspace.trainer(*resume)).refused(3, "401")
    hub.token = CANARY
    kinds: tuple[Kind, ...] = ("500", "429", "expired", "reset", "corrupt")
    for kind in kinds:
        hub.faults.add("/cdn/", kind, count=1000)
        overrides = ("--override", IMPATIENT, "--override", "data.cache_limit=1B")
        secret(workspace.trainer(*resume, *overrides))
        hub.faults.clear()
    secret(workspace.trainer(*resume, "--override", "data.no_such_key=1")).refused(2, "no_such_key")

    for endpoint, code in (("http://127.0.0.1:1", 3), ("http://cdn.invalid", 3), ("nonsense", 2)):
        off = Workspace(workspace.root, {**workspace.extra_environment, "HF_ENDPOINT": endpoint})
        secret(off.trainer(*resume)).refused(code, endpoint)
    broken = Workspace(workspace.root, {**workspace.extra_environment, "HF_TOKEN": f"{CANARY} {CANARY}"})
    secret(broken.trainer(*resume)).refused(2, "HF_TOKEN")
    secret(workspace.trainer(*resume)).succeeded()
    assert_kept(workspace, hub)


@pytest.mark.parametrize("launch", ["process", "bindings"])
def test_no_list_of_processes_and_no_interrupt_tells_the_token(
    private_hub: tuple[FakeHub, Workspace], launch: str
) -> None:
    hub, workspace = private_hub
    flags = ("--steps=100000", f"--launch={launch}", "--experiment=listed")
    process = workspace.start(ORCHESTRATE, *STREAM, *flags)
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 3/"):
            break
    processes = family(process)
    names = [(folder / "cmdline").read_bytes() for folder in processes]
    variables = [(folder / "environ").read_bytes() for folder in processes]
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 130, output[-2000:]
    assert CANARY not in output
    assert any(TRAINER.name.encode() in name for name in names) == (launch == "process")
    assert not any(CANARY.encode() in name for name in names)
    has_token = "HF_TOKEN" in workspace.extra_environment
    assert all((CANARY.encode() in variable) == has_token for variable in variables)
    assert_kept(workspace, hub)
