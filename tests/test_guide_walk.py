"""The walkthrough of the guide, as typed, against a Hub with FineWeb's layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fake_hub import FakeHub, Repository, write_fineweb
from workspace import REPOSITORY, TINY_CONFIG, TINY_MODEL, Workspace

PREPARE = "--stream --split train --max-samples 300 --vocab-size 384 --launch none".split()


def prepare(workspace: Workspace, experiment: str) -> None:
    """Take the first three steps of the guide: stream and tokenizer, a config, the special tokens."""
    workspace.orchestrate(*PREPARE, "--dataset", "HuggingFaceFW/fineweb", "--experiment", experiment).succeeded()
    run = workspace.run_folder(experiment)
    (run / "training.yaml").write_text(TINY_CONFIG)
    (run / "special_tokens.txt").write_text('["<|endoftext|>", "<|pad|>"]\n')


def test_preparing_writes_the_guides_files_and_trains_nothing(hub_workspace: Workspace, hub: FakeHub) -> None:
    hub_workspace.orchestrate(*PREPARE, "--dataset", "HuggingFaceFW/fineweb", "--experiment", "walk").succeeded()
    run = hub_workspace.run_folder("walk")
    streaming = json.loads((run / "streaming_config.json").read_text())
    assert list(streaming)[:5] == ["dataset", "split", "max_samples", "stream_batch_size", "experiment"]
    assert streaming["dataset"] == "HuggingFaceFW/fineweb"
    assert streaming["max_samples"] == 300
    assert streaming["revision"] == Repository(hub.root, "datasets", "HuggingFaceFW/fineweb").commit()
    tokenizer = hub_workspace.root / "artifacts" / "tokenizer" / "walk"
    names = {path.name for path in tokenizer.iterdir()}
    expected = "tokenizer.json vocab.json merges.txt tokenizer_config.json special_tokens_map.json manifest.json"
    assert names >= set(expected.split())
    assert (run / "training.yaml").is_file()
    assert not (run / "checkpoints").exists()


def test_cargo_run_train_sees_the_streaming_config_and_streams(hub_workspace: Workspace, hub: FakeHub) -> None:
    prepare(hub_workspace, "walk")
    config = hub_workspace.run_folder("walk") / "training.yaml"
    before = len(hub.requests)
    command = f"cargo run --quiet train --config {config}".split()
    hub_workspace.command(*command, folder=REPOSITORY, timeout=900).succeeded()
    assert any(request.path.startswith("/cdn/") for request in hub.requests[before:])
    assert len(hub_workspace.losses("walk")) == 6
    assert hub_workspace.metrics("walk", "evaluation")
    assert hub_workspace.checkpoints("walk") == ["step-00000003", "step-00000006"]


def test_the_train_program_is_the_same_trainer(hub_workspace: Workspace) -> None:
    prepare(hub_workspace, "walk")
    shutil.copytree(hub_workspace.run_folder("walk"), hub_workspace.run_folder("again"))
    for name, command in (("walk", "train --config"), ("again", "-p training --bin train -- --config")):
        command_line = f"cargo run --quiet {command} {hub_workspace.run_folder(name)}/training.yaml".split()
        hub_workspace.command(*command_line, folder=REPOSITORY, timeout=900).succeeded()
    assert hub_workspace.losses("walk") == hub_workspace.losses("again")


def test_the_rust_orchestrate_prepares_fineweb_without_training(hub_workspace: Workspace) -> None:
    command = "cargo run --quiet -p training --bin orchestrate --manifest-path".split()
    flags = "--stream --vocab-size 384 --max-samples 200 --experiment alias".split()
    manifest = REPOSITORY / "Cargo.toml"
    hub_workspace.command(*command, manifest, "--", *flags, timeout=900).succeeded()
    streaming = json.loads((hub_workspace.run_folder("alias") / "streaming_config.json").read_text())
    assert streaming["dataset"] == "HuggingFaceFW/fineweb"
    assert not (hub_workspace.run_folder("alias") / "checkpoints").exists()


def test_without_max_samples_the_stream_has_no_end(hub_workspace: Workspace) -> None:
    """240 documents a file, 3 files: the run takes far more tokens than one epoch holds."""
    flags = "--stream --dataset HuggingFaceFW/fineweb --data-config CC-MAIN-2014-10 --experiment endless".split()
    sizes = "--steps 40 --seq-len 256 --batch-size 16 --grad-accum 1 --evaluate-every 1000".split()
    hub_workspace.orchestrate(*TINY_MODEL, *flags, *sizes).succeeded()
    streaming = json.loads((hub_workspace.run_folder("endless") / "streaming_config.json").read_text())
    assert streaming["max_samples"] is None
    assert streaming["config"] == "CC-MAIN-2014-10"
    rows = hub_workspace.metrics("endless")
    assert len(rows) == 40
    assert rows[-1]["tokens"] > 150_000


def test_a_guides_config_resumes_with_its_first_revision(tmp_path: Path) -> None:
    """Five keys name no revision; the checkpoint remembers it for training and evaluation, whatever the branch says."""
    write_fineweb(tmp_path / "hub")
    with FakeHub(tmp_path / "hub") as hub:
        workspace = Workspace(tmp_path, hub.environment(tmp_path / "hf"))
        prepare(workspace, "moved")
        path = workspace.run_folder("moved") / "streaming_config.json"
        five = dict(list(json.loads(path.read_text()).items())[:5])
        path.write_text(json.dumps(five))
        train = ("train", "--config", workspace.run_folder("moved") / "training.yaml")
        workspace.trainer(*train, "--max-steps=3").succeeded()
        began = Repository(tmp_path / "hub", "datasets", "HuggingFaceFW/fineweb").commit()
        hub.keep_commit("HuggingFaceFW/fineweb")
        with (tmp_path / "hub/datasets/HuggingFaceFW/fineweb/README.md").open("a") as gpu:
            gpu.write("Another commit.\n")
        workspace.trainer(*train, "--resume").succeeded()
        hub.requests.clear()
        workspace.trainer("evaluate", "--experiment", "moved").succeeded()
        revisions = [request.path for request in hub.requests if "/revision/" in request.path]
    assert revisions, "an evaluation asks for its commit"
    assert all(began in path for path in revisions)
    assert [row["step"] for row in workspace.metrics("moved")] == list(range(1, 7))
