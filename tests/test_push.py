"""Pushing to the Hub: what arrives, who can see it, what an interrupted push leaves, and what is refused."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from emulated_terminal import on_terminal
from fake_hub import FakeHub
from fake_hub.faults import Kind, Refusal
from orchestrator import push
from orchestrator.model_source import Source
from workspace import ORCHESTRATE, REPOSITORY, TINY_MODEL, Workspace

TOKEN = "hf_CANARYabcdefghijklmnopqrstuvwxyz0123"
GOLDEN = REPOSITORY / "tests/golden/checkpoints/first_bf16_mixture/run"
STEP = "step-00000004"

DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], revision=sys.argv[2]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a repository, whose token is that of `alice`."""
    (tmp_path / "hub").mkdir()
    with FakeHub(tmp_path / "hub", token=TOKEN) as hub:
        yield hub


@pytest.fixture
def workspace(tmp_path: Path, hub: FakeHub) -> Workspace:
    """A workspace with the run `E`, which has one checkpoint, logged in to the Hub."""
    root = tmp_path / "work"
    shutil.copytree(GOLDEN, root / "runs" / "E")
    return Workspace(root, hub.environment(tmp_path / "hf"))


def pushed(workspace: Workspace, *flags: str | Path) -> str:
    """Push `E`; return what is printed."""
    process = workspace.orchestrate("push", "alice/tiny", "--experiment=E", *flags).succeeded()
    assert TOKEN not in process.out + process.err
    return process.out


def exported(workspace: Workspace, name: str = "exported") -> dict[str, bytes]:
    """Return the files of `export --format hf`, less the card, which names another folder to load from."""
    workspace.orchestrate("export", "--experiment=E", "--format=hf", "--out", name).succeeded()
    folder = workspace.root / name
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def downloaded(workspace: Workspace, revision: str) -> dict[str, bytes]:
    """Return the files that the real client downloads from the repository."""
    command = [sys.executable, "-c", DOWNLOAD, "alice/tiny", revision]
    folder = Path(workspace.command(*command).succeeded().out.strip())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def uploads_of(hub: FakeHub) -> list[str]:
    """Return the large files that arrived, each as often as it was sent."""
    return [request.path for request in hub.requests if request.method == "PUT" and request.status == 200]


def commits(hub: FakeHub) -> int:
    return len([request for request in hub.requests if "/commit/" in request.path and request.status == 200])


def staged(workspace: Workspace) -> bool:
    """Whether a copy of the model is left in the cache."""
    return any((workspace.root / "cache" / "push").glob("*/model"))


def test_a_trained_model_arrives_as_it_was_exported(workspace: Workspace, hub: FakeHub) -> None:
    workspace.orchestrate(
        *TINY_MODEL, "--input", workspace.write_text(), "--steps=4", "--checkpoint-every=2", "--experiment=E2"
    ).succeeded()
    (workspace.root / "runs" / "E").rename(workspace.root / "golden")
    (workspace.root / "runs" / "E2").rename(workspace.root / "runs" / "E")
    out = pushed(workspace)
    assert "repository alice/tiny, private, made by alice" in out
    assert f"tag        {STEP}\n" in out
    assert f"page       {hub.endpoint}/alice/tiny\n" in out
    assert "pipeline('text-generation', 'alice/tiny')" in out
    assert hub.uploads.private == {"alice/tiny"}
    for revision in ("main", STEP):
        files = downloaded(workspace, revision)
        card = files.pop("README.md").decode()
        assert 'from_pretrained("alice/tiny", dtype="auto")' in card
        assert files.pop(".gitattributes")
        assert files == exported(workspace, revision)
    assert commits(hub) == 1
    storage = [request for request in hub.requests if request.host.startswith("localhost")]
    assert storage
    assert not any(request.authorization for request in storage)
    assert not staged(workspace)


def test_the_tag_of_a_step_stays_keeps_and_moves(workspace: Workspace, hub: FakeHub) -> None:
    pushed(workspace)
    first = downloaded(workspace, STEP)
    second_push = pushed(workspace)
    assert "repository alice/tiny, private, there already" in second_push
    assert "the Hub has these files already" in second_push
    assert f"tag        {STEP}, there already" in second_push
    assert commits(hub) == 1

    run = workspace.run_folder("E")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss":5.17315723374486', '"loss":5.0'))
    former = hub.uploads.refs["alice/tiny"]["tags"][STEP]
    moved = pushed(workspace)
    assert f"tag        {STEP}, moved from {former[:12]}" in moved
    assert len(uploads_of(hub)) == 1, "the weights did not change"
    assert b"5.0000" in downloaded(workspace, STEP)["README.md"]
    assert downloaded(workspace, former) == first


def test_fewer_shards_leave_none_of_the_former(workspace: Workspace, hub: FakeHub) -> None:
    pushed(workspace)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    hub.uploads.edit("alice/tiny", dict.fromkeys([*shards, "notes.txt"], "of another model"))
    pushed(workspace, "--message=Fewer shards")
    assert hub.uploads.messages == [f"Upload E, {STEP}", "Fewer shards"]
    remaining = downloaded(workspace, "main").keys()
    assert {"model.safetensors", "notes.txt"} < remaining
    assert not remaining & set(shards)


def test_public_is_asked_for_and_only_for_a_new_repository(workspace: Workspace, hub: FakeHub) -> None:
    assert "repository alice/tiny, public, made by alice" in pushed(workspace, "--public")
    assert not hub.uploads.private
    process = workspace.orchestrate("push", "team/tiny", "--experiment=E").succeeded()
    assert "repository team/tiny, private" in process.out
    process = workspace.orchestrate("push", "team/tiny", "--experiment=E", "--public").succeeded()
    assert "team/tiny stays private" in process.err
    assert hub.uploads.private == {"team/tiny"}


def test_a_branch_is_made_and_main_stays(workspace: Workspace, hub: FakeHub) -> None:
    out = pushed(workspace, "--branch=trial")
    assert f"page       {hub.endpoint}/alice/tiny/tree/trial" in out
    assert f"revision='{STEP}'" in out
    assert set(downloaded(workspace, "main")) == {".gitattributes"}
    assert "model.safetensors" in downloaded(workspace, "trial")


def test_the_card_is_compared_without_a_bar(workspace: Workspace, hub: FakeHub) -> None:
    del hub
    pushed(workspace)
    with on_terminal(workspace, ORCHESTRATE, "push", "alice/tiny", "--experiment=E") as terminal:
        assert terminal.wait_for_end() == 0
        assert b"there already" in terminal.written and b"/README.md:" not in terminal.written


def test_an_edited_card_is_kept(workspace: Workspace, hub: FakeHub) -> None:
    pushed(workspace)
    hub.uploads.edit("alice/tiny", {"README.md": "---\nlicense: mit\n---\nMy own words.\n"})
    assert "README.md of the repository is kept" in pushed(workspace)
    assert b"My own words." in downloaded(workspace, "main")["README.md"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_push_is_continued_with_the_rest(workspace: Workspace, hub: FakeHub, number: signal.Signals) -> None:
    """Stopped while the second of two large files is on its way."""
    shards = "--max-shard-size=10KB"
    moments = queue.SimpleQueue[str]()
    hub.on_request = moments.put
    hub.faults.add("/lfs-store/", "stall", skip=1)
    process = workspace.start(ORCHESTRATE, "push", "alice/tiny", "--experiment=E", shards)
    # The first of the files is asked about once it has arrived.
    uploads, is_verified = 0, False
    while uploads < 2 or not is_verified:
        path = moments.get(timeout=120)
        uploads += "/lfs-store/" in path
        is_verified = is_verified or path.endswith("/verify")
    second = workspace.orchestrate("push", "alice/tiny", "--experiment=E")
    second.refused(2, "another push to alice/tiny is running")
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), out
    assert commits(hub) == 0
    assert {path.name for path in (hub.root / "models/alice/tiny").iterdir()} == {".gitattributes"}
    assert staged(workspace) == (number == signal.SIGKILL)

    assert len(uploads_of(hub)) == 1
    assert f"tag        {STEP}\n" in pushed(workspace, shards)
    assert len(uploads_of(hub)) == len(set(uploads_of(hub))) == 2
    assert {"model-00002-of-00002.safetensors", "model.safetensors.index.json"} < downloaded(workspace, "main").keys()
    assert not staged(workspace)


def test_a_cut_connection_is_tried_again(workspace: Workspace, hub: FakeHub) -> None:
    hub.faults.add("/lfs-store/", "reset")
    pushed(workspace)
    assert [request.fault for request in hub.requests if request.method == "PUT"] == ["reset", None]
    assert downloaded(workspace, STEP)["model.safetensors"] == exported(workspace)["model.safetensors"]


def test_a_failure_is_a_sentence_and_leaves_the_repository(workspace: Workspace, hub: FakeHub) -> None:
    push = ["push", "alice/tiny", "--experiment=E"]
    advice = "Push again"
    failures: tuple[tuple[str, Kind | Refusal, tuple[str, ...]], ...] = (
        ("/lfs-store/", "403", ("was not sent", "403", advice)),
        ("/commit/", "500", ("the Hub answered 500", advice)),
        ("/commit/", "409", ("was changed by somebody else", advice)),
    )
    for path, kind, words in failures:
        hub.faults.add(path, kind)
        workspace.orchestrate(*push).refused(1, *words)
        assert {path.name for path in (hub.root / "models/alice/tiny").iterdir()} == {".gitattributes"}
    assert not staged(workspace)
    hub.faults.add("/commit/", "reset")
    workspace.orchestrate(*push).refused(1, "the push of alice/tiny to", advice)
    hub.faults.add("/tag/", "500")
    workspace.orchestrate(*push).refused(1, "the Hub answered 500", advice)
    assert f"tag        {STEP}\n" in pushed(workspace)
    assert len(uploads_of(hub)) == 1


def test_a_link_in_the_cache_is_not_followed(workspace: Workspace, hub: FakeHub) -> None:
    own, folder = workspace.root / "own.txt", workspace.root / "cache/push/alice--tiny"
    own.write_text("kept")
    folder.mkdir(parents=True)
    (folder / "lock").symlink_to(own)
    workspace.orchestrate("push", "alice/tiny", "--experiment=E").refused(1, str(folder / "lock"))
    shutil.rmtree(folder)
    elsewhere = workspace.root / "elsewhere"
    (elsewhere / "model").mkdir(parents=True)
    folder.symlink_to(elsewhere)
    workspace.orchestrate("push", "alice/tiny", "--experiment=E").refused(2, str(folder), "symbolic link")
    assert own.read_text() == "kept" and (elsewhere / "model").is_dir()


def test_missing_permissions_of_the_token_are_named(workspace: Workspace, hub: FakeHub) -> None:
    def refused(code: int, *words: str, repository: str = "alice/tiny", **environment: str) -> None:
        other = Workspace(workspace.root, {**workspace.extra_environment, **environment})
        process = other.orchestrate("push", repository, "--experiment=E").refused(code, *words)
        assert TOKEN not in process.out + process.err

    refused(2, "needs a token", "https://huggingface.co/settings/tokens", "hf auth login", HF_TOKEN="")
    refused(2, "does not accept the token in HF_TOKEN", HF_TOKEN="hf_other")
    own = "push as alice/NAME or team/NAME"
    refused(2, "may not write to bob/tiny", 'namespace "bob"', own, repository="bob/tiny")
    refused(2, "HF_HUB_OFFLINE", HF_HUB_OFFLINE="1")
    refused(1, "http://127.0.0.1:9", "Connection refused", "Push again", HF_ENDPOINT="http://127.0.0.1:9")
    hub.uploads.is_read_only = True
    refused(2, "may not write to alice/tiny", "rights to create")
    hub.uploads.is_read_only = False
    pushed(workspace)
    hub.uploads.is_read_only = True
    (workspace.run_folder("E") / "metrics.jsonl").unlink()
    refused(2, "may not write to alice/tiny", "required permissions")


def test_a_dry_run_lists_files_and_asks_the_hub_nothing(workspace: Workspace, hub: FakeHub) -> None:
    output = workspace.orchestrate("push", "alice/tiny", "E", "--dry-run").succeeded().out
    for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json"):
        assert name in output
    assert "nothing was sent to alice/tiny" in output
    assert not hub.requests


def test_wrong_commands_ask_the_hub_nothing(workspace: Workspace, hub: FakeHub) -> None:
    for flags, words in {
        "alice/tiny --experiment=E --checkpoint=E": ("say one thing to push",),
        "tiny --experiment=E": ("tiny is not a repository", "OWNER/NAME"),
        "alice/tiny@v1 --experiment=E": ("alice/tiny@v1 is not a repository",),
        "alice/a--b --experiment=E": ("alice/a--b is not a name",),
        "alice/tiny --experiment=E --max-shard-size=big": ("--max-shard-size big",),
    }.items():
        workspace.orchestrate("push", *flags.split()).refused(2, *words)
    assert not hub.requests
    workspace.orchestrate("push", "alice/tiny", "--experiment=none").refused(2, "no experiment", "none")
    assert not (hub.root / "models").exists()


def test_with_xet_the_same_commit_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake Hub has no Xet: what is checked is what huggingface_hub is called with."""
    calls: dict[str, Any] = {}
    head = SimpleNamespace(sha="a" * 40, siblings=[SimpleNamespace(rfilename="model-00001-of-00002.safetensors")])

    class Api:
        endpoint = "https://huggingface.co"

        def __init__(self, **_options: str) -> None:
            pass

        def whoami(self) -> dict[str, str]:
            return {"name": "alice"}

        def create_repo(self, repository: str, private: bool) -> None:
            calls["private"] = private

        def model_info(self, _repository: str, revision: str) -> SimpleNamespace:
            return head

        def create_commit(self, repository: str, operations: list[Any], **options: str) -> SimpleNamespace:
            calls["commit"] = [(type(operation).__name__, operation.path_in_repo) for operation in operations], options
            calls["bytes"] = {
                operation.path_in_repo: Path(operation.path_or_fileobj).stat().st_size for operation in operations[:-1]
            }
            return SimpleNamespace(oid="b" * 40)

        def list_repo_refs(self, _repository: str) -> SimpleNamespace:
            return SimpleNamespace(tags=[])

        def create_tag(self, _repository: str, tag: str, revision: str) -> None:
            calls["tag"] = tag, revision

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setenv("ORCHESTRATE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    push.run("alice/tiny", Source(GOLDEN / "checkpoints" / STEP, None), False, False, "main", None, None)
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    files += ["tokenizer_config.json"]
    assert calls["private"] is True
    assert calls["commit"] == (
        [*(("CommitOperationAdd", name) for name in files), ("CommitOperationDelete", head.siblings[0].rfilename)],
        {"commit_message": f"Upload run, {STEP}", "revision": "main"},
    )
    assert calls["bytes"]["model.safetensors"] == 14144
    assert calls["tag"] == (STEP, "b" * 40)
