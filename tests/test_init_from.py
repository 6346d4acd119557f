"""Continued pre-training: from a folder and from a repository of the Hub, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from emulated_terminal import on_terminal
from fake_hub import FakeHub, Repository
from orchestrator import run_request
from orchestrator.paths import Roots
from orchestrator.settings import Launch, Settings
from workspace import ORCHESTRATE, TINY_MODEL, Workspace

RUN = "--seq-len=32 --batch-size=2 --grad-accum=2 --steps=4 --log-every=1 --evaluate-every=4 --eval-batches=2".split()
SETTINGS = [*RUN, "--preset=smoke_cpu", "--device=cpu", "--override=data.held_out_fraction=0.1"]


@pytest.fixture
def hub_root(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def pretrain(workspace: Workspace) -> tuple[Path, Path]:
    """Train a short run; return its text and its last checkpoint."""
    text = workspace.write_text()
    flags = [*TINY_MODEL, f"--input={text}", "--steps=8", "--evaluate-every=8", "--experiment=first"]
    workspace.orchestrate(*flags, "--override=data.held_out_fraction=0.1").succeeded()
    return text, workspace.run_folder("first") / "checkpoints" / "step-00000008"


def start(workspace: Workspace, text: Path, model: str | Path, *flags: str) -> list[str | Path]:
    return ["--init-from", model, "--input", text, *SETTINGS, "--experiment=second", *flags]


def test_a_run_starts_where_the_model_ended(workspace: Workspace) -> None:
    text, checkpoint = pretrain(workspace)
    out = workspace.orchestrate(*start(workspace, text, checkpoint)).succeeded().out
    assert f"training starts from the weights in {checkpoint}" in out
    (before,) = workspace.metrics("first", "evaluation")
    after = workspace.metrics("second", "evaluation")
    assert [row["step"] for row in after] == [0, 4]
    assert after[0]["loss"] == before["loss"]
    resolved_config = json.loads((workspace.run_folder("second") / "resolved_config.json").read_text())
    model, optimizer = resolved_config["model"], resolved_config["optimizer"]
    assert (model["hidden_size"], model["num_layers"], model["vocab_size"]) == (32, 2, 384)
    assert (optimizer["algorithm"], optimizer["learning_rate"]) == ("adamw", 5e-5)

    shutil.rmtree(checkpoint)
    flags = ["--experiment=second", "--resume", "--steps=6"]
    workspace.orchestrate(*flags).succeeded()
    assert [row["step"] for row in workspace.metrics("second")] == [1, 2, 3, 4, 5, 6]


def test_a_request_holds_the_folder_of_the_model(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    text, checkpoint = pretrain(workspace)
    monkeypatch.chdir(workspace.root)
    before = sorted(workspace.root.rglob("*"))
    keys = {"init_from": "first", "seq_len": 32}
    settings = Settings(input=[str(text)], preset="smoke_cpu", launch=Launch.NONE, keys=keys)
    request = run_request.resolve(settings, Roots.from_environment())
    assert request.settings.init_from == str(checkpoint) == str(request.base.pretrained)
    assert keys == {"init_from": "first", "seq_len": 32}
    assert sorted(workspace.root.rglob("*")) == before


@pytest.mark.slow
def test_a_repository_of_the_hub_is_downloaded_and_its_commit_pinned(hub_workspace: Workspace, hub: FakeHub) -> None:
    workspace = hub_workspace
    text, checkpoint = pretrain(workspace)
    repository = hub.root / "models" / "owner" / "tiny-llama"
    shutil.copytree(checkpoint, repository, ignore=shutil.ignore_patterns("optimizer*", "MANIFEST*", "trainer*"))
    (repository / "consolidated.safetensors").write_bytes(b"the same weights again")
    workspace.orchestrate(*start(workspace, text, "owner/tiny-llama")).succeeded()
    config = (workspace.run_folder("second") / "training.yaml").read_text()
    commit = Repository(hub.root, "models", "owner/tiny-llama").commit()
    assert f"models--owner--tiny-llama/snapshots/{commit}\n" in config
    assert not any("consolidated" in request.path for request in hub.requests)

    # A terminal shows the download only while it lasts, and each line after it begins at the left.
    empty = Workspace(workspace.root, {**workspace.extra_environment, "HF_HOME": str(workspace.root / "empty")})
    command = start(workspace, text, "owner/tiny-llama", "--experiment=seen", "--launch=none")
    with on_terminal(empty, ORCHESTRATE, *command, lines=60) as terminal:
        assert terminal.wait_for_end() == 0
        assert b"Fetching" in terminal.written
        assert not any(bar in terminal.text for bar in ("Fetching", "Download", "Reconstruct")), terminal.text
        assert "\nmodel      owner/tiny-llama" in f"\n{terminal.text}"

    offline = Workspace(workspace.root, {**workspace.extra_environment, "HF_HUB_OFFLINE": "1"})
    offline.orchestrate(*start(workspace, text, "owner/tiny-llama", "--experiment=third")).succeeded()
    foreign = hub.root / "models" / "owner" / "gemma"
    shutil.copytree(repository, foreign)
    (foreign / "config.json").write_text(json.dumps({"model_type": "gemma", "hidden_act": "gelu"}))
    gemma = workspace.orchestrate(*start(workspace, text, "owner/gemma", "--experiment=fourth"))
    gemma.refused(2, "`model_type` is `gemma`, which has the activation `gelu`", "(given by --init-from)")
    requested_paths = [request.path for request in hub.requests if "owner/gemma/resolve" in request.path]
    assert requested_paths
    assert all(path.endswith("config.json") for path in requested_paths), (
        "weights that cannot be used are not downloaded"
    )
    (repository / "tokenizer.json").rename(repository / "tokenizer.model")
    no_tokenizer = workspace.orchestrate(*start(workspace, text, "owner/tiny-llama", "--experiment=fourth"))
    no_tokenizer.refused(2, "has no tokenizer.json", "save_pretrained")
    unknown = workspace.orchestrate(*start(workspace, text, "owner/other", "--experiment=fourth"))
    unknown.refused(2, "--init-from owner/other", "no such model on the Hub")
    revision = workspace.orchestrate(*start(workspace, text, "owner/tiny-llama@v9", "--experiment=fourth"))
    revision.refused(2, "has no revision 'v9'")
    nowhere = Workspace(workspace.root, {**workspace.extra_environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    down = nowhere.orchestrate(*start(workspace, text, "owner/other", "--experiment=fourth"))
    down.refused(3, "cannot be downloaded")
    assert not workspace.run_folder("fourth").exists()


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(workspace: Workspace) -> None:
    text, model = pretrain(workspace)
    (model / "MANIFEST.json").unlink()
    (model / "tokenizer_config.json").write_text("{eos")
    config = workspace.root / "training.yaml"
    data = f"{{train_shards: [{text}], sequence_length: 32, sequences_per_step: 4}}"
    config.write_text(f"model: {{init_from: {model}}}\ndata: {data}\nscheduler: {{total_steps: 1}}\n")
    words = ("tokenizer_config.json", "line 1 column 2")
    workspace.orchestrate(*start(workspace, text, model)).refused(2, *words)
    workspace.orchestrate("export", "--checkpoint", model, "--format=hf").refused(2, *words)
    workspace.trainer("train", "--config", config).refused(2, *words)
    workspace.trainer("generate", "--checkpoint", model, "--prompt=def").refused(2, *words)

    (model / "tokenizer_config.json").unlink()
    tokenizer = model / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    last = {**content["added_tokens"][0], "id": 384, "content": "<|another|>"}
    tokenizer.write_text(json.dumps({**content, "added_tokens": [*content["added_tokens"], last]}))
    added = (f"{tokenizer} has added tokens up to the id 384 (<|another|>)", "resize_token_embeddings(385)")
    workspace.orchestrate(*start(workspace, text, model)).refused(2, *added)
    workspace.trainer("train", "--config", config).refused(2, "less than the tokenizer's 385")
    tokenizer.write_text("{model")
    workspace.orchestrate(*start(workspace, text, model)).refused(2, "is not a tokenizer.json")
    assert not workspace.run_folder("second").exists()


def test_contradicting_flags_are_refused(workspace: Workspace) -> None:
    text, checkpoint = pretrain(workspace)
    messages = {
        "--hidden-size=64": ("model.hidden_size: is 64, but the model in", "has 32", "--hidden-size"),
        "--vocab-size=512": ("leave out --vocab-size",),
        "--force-retrain-tokenizer": ("leave out --force-retrain-tokenizer",),
    }
    for flag, words in messages.items():
        workspace.orchestrate(*start(workspace, text, checkpoint, flag)).refused(2, *words)
    workspace.orchestrate(*start(workspace, text, "./nowhere")).refused(2, "--init-from ./nowhere", "no such folder")
    (checkpoint / "model.safetensors").write_bytes(b"short")
    workspace.orchestrate(*start(workspace, text, checkpoint)).refused(5, "corrupted")
    assert not (workspace.run_folder("second") / "checkpoints").exists()
