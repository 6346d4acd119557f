"""A run is used with its own tokenizer: a lost one is its checkpoint's, a changed one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_finetune import SMALL, pretrained, write_rows
from workspace import Workspace

__all__ = ["pretrained"]

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}"
FILES = ("model.safetensors", "optimizer.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def model(workspace: Workspace, pretrained: Path) -> Path:
    """A model whose tokenizer_config.json adds a token, with a chat template of its own."""
    folder = Path(shutil.copytree(pretrained, workspace.root / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    decoder = {"383": {"content": "<|turn|>", "special": True, "lstrip": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": decoder}))
    return folder


def start(workspace: Workspace, model: Path, experiment: str, steps: int) -> Path:
    (workspace.root / "own.jinja").write_text(TEMPLATE)
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = [*SMALL, "--input", str(rows), "--chat-template=own.jinja", "--schedule=constant", f"--steps={steps}"]
    workspace.orchestrate("finetune", "--model", model, f"--experiment={experiment}", *flags).succeeded()
    return workspace.run_folder(experiment)


@pytest.mark.parametrize("relocate", ["stay", "move", "copy"])
@pytest.mark.parametrize("with_model", [True, False])
def test_chat_run_resumes_without_its_tokenizer(
    workspace: Workspace, model: Path, relocate: str, with_model: bool
) -> None:
    straight = start(workspace, model, "straight", 5)
    run = start(workspace, model, "chat", 3)
    shutil.rmtree(run / "tokenizer")
    if relocate != "stay":
        relocated = workspace.root / "elsewhere" / "renamed"
        relocated.parent.mkdir()
        shutil.copytree(run, relocated, symlinks=True)
        if relocate == "move":
            shutil.rmtree(run)
        run = relocated
    if not with_model:
        shutil.rmtree(model)
    shutil.rmtree(workspace.root / "artifacts", ignore_errors=True)
    output = workspace.orchestrate("--resume", run, "--steps=5").succeeded().out
    assert "tokenizer.json does not exist: the tokenizer is the checkpoint's" in output
    assert f"is restored to {run / 'tokenizer'}" in output
    for name in FILES:
        last = Path("checkpoints", "step-00000005", name)
        assert (run / last).read_bytes() == (straight / last).read_bytes(), name
    assert (run / "tokenizer/chat_template.jinja").read_text() == TEMPLATE
    second_output = workspace.orchestrate("--resume", run, "--steps=6").succeeded().out
    assert "does not exist" not in second_output


def test_a_corrupted_template_is_not_restored(workspace: Workspace, model: Path) -> None:
    run = start(workspace, model, "chat", 3)
    shutil.rmtree(run / "tokenizer")
    template = run / "checkpoints/step-00000003/chat_template.jinja"
    template.write_text(template.read_text().replace("[", "<"))
    process = workspace.orchestrate("--resume", run, "--steps=5")
    process.refused(5, "step-00000003", "chat_template.jinja is not what was written")
    assert not (run / "tokenizer").exists()


def swap_tokens(tokenizer_json: Path) -> None:
    """Exchange two tokens of a vocabulary, so that texts have other ids."""
    content = json.loads(tokenizer_json.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    tokenizer_json.write_text(json.dumps(content, indent=2, ensure_ascii=False))


@pytest.mark.parametrize("command", [
    ["generate", "--prompt=x"], ["evaluate"], ["chat", "--once=hi"], ["export", "--format=hf", "--out=out"],
    ["push", "--dry-run", "owner/name"],
])  # fmt: skip
def test_a_changed_tokenizer_of_a_checkpoint_is_refused(workspace: Workspace, model: Path, command: list[str]) -> None:
    checkpoint = start(workspace, model, "chat", 1) / "checkpoints/step-00000001"
    workspace.orchestrate(*command, "--checkpoint", checkpoint).succeeded()
    shutil.rmtree(workspace.root / "out", ignore_errors=True)
    swap_tokens(checkpoint / "tokenizer.json")
    programs = [workspace.orchestrate] + ([workspace.trainer] if command[0] in ("generate", "evaluate") else [])
    for program in programs:
        program(*command, "--checkpoint", checkpoint).refused(
            5, str(checkpoint), "tokenizer.json is not what was written"
        )


def test_data_are_validated_with_the_runs_tokenizer(workspace: Workspace, model: Path) -> None:
    run = start(workspace, model, "chat", 1)
    swap_tokens(run / "tokenizer/tokenizer.json")
    process = workspace.orchestrate("validate-data", run)
    process.refused(2, f"{run / 'tokenizer/tokenizer.json'} is not the tokenizer", f"{run}/checkpoints/step-00000001")
