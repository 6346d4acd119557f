"""Exporting: the model directory and its card, what is refused, and the packages that it needs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard, get_local_safetensors_metadata
from orchestrator.command_error import CommandError
from orchestrator.exported_model import MergedTensor
from orchestrator.safetensors_shards import stored_tensors, tensors_of_file, write_shards
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from workspace import ORCHESTRATE, REPOSITORY, TINY_MODEL, Workspace

GOLDEN = REPOSITORY / "tests/golden/checkpoints/first_bf16_mixture/run"
STEP = "step-00000004"
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


def train(workspace: Workspace, *flags: str | Path) -> Path:
    """Train a short run named E; return its newest checkpoint."""
    steps = ["--steps=4", "--evaluate-every=2", "--checkpoint-every=2"]
    workspace.orchestrate(*TINY_MODEL, *steps, "--experiment=E", *flags).succeeded()
    return workspace.run_folder("E") / "checkpoints" / workspace.checkpoints("E")[-1]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def raw_tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor, whatever its type and file."""
    tensor_bytes = {}
    for name, metadata in get_local_safetensors_metadata(folder).files_metadata.items():
        content = (folder / name).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for tensor, info in metadata.tensors.items():
            first, end = info.data_offsets
            tensor_bytes[tensor] = content[start + first : start + end]
    return tensor_bytes


@pytest.mark.skipif(importlib.util.find_spec("gguf") is not None, reason="gguf is installed here")
def test_a_missing_package_is_named_with_its_command(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN, workspace.root / "runs" / "E")
    command = "-m pip install 'gguf>="
    workspace.orchestrate("export", "E", "--format=gguf").refused(2, command)
    workspace.orchestrate("export", "E", "--out=model.gguf").refused(2, command)
    assert command in workspace.orchestrate("export", "E").succeeded().out
    assert names(workspace.root / "E-hf") >= {"model.safetensors", "config.json"}, "the other format is written"


def test_the_folder_has_what_loads_and_no_optimizer(workspace: Workspace) -> None:
    checkpoint = train(workspace, "--input", workspace.write_text())
    process = workspace.orchestrate("export", "--experiment=E", "--format=hf").succeeded()
    folder = workspace.root / "E-hf"
    assert f"wrote      {folder} (7 files, " in process.out
    assert names(folder) == FILES
    for name in FILES - {"README.md"}:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes(), name


def test_shards_hold_the_same_bytes_and_an_index(workspace: Workspace) -> None:
    checkpoint = GOLDEN / "checkpoints" / STEP
    flags = ["--format=hf", "--max-shard-size=4KB", "--out=sharded"]
    workspace.orchestrate("export", "--checkpoint", checkpoint, *flags).succeeded()
    folder = workspace.root / "sharded"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    assert len(shards) > 2
    assert raw_tensors(folder) == raw_tensors(checkpoint)
    assert index["metadata"]["total_size"] == sum(map(len, raw_tensors(folder).values()))
    for shard in shards:
        with safe_open(folder / shard, "np") as file:
            assert file.metadata() == {"format": "pt"}
            tensor_names = {name for name, place in index["weight_map"].items() if place == shard}
            assert set(file.keys()) == tensor_names
            sizes = [len(raw_tensors(folder)[name]) for name in tensor_names]
            assert sum(sizes) <= 4000 or len(sizes) == 1

    join = ["export", "--checkpoint=sharded", "--format=hf"]
    workspace.orchestrate(*join, "--out=joined").succeeded()
    assert raw_tensors(workspace.root / "joined") == raw_tensors(checkpoint)
    assert not (workspace.root / "joined" / "model.safetensors.index.json").exists()

    (folder / shards[1]).write_bytes((folder / shards[0]).read_bytes())
    workspace.orchestrate(*join).refused(2, shards[1], "is in another file too")
    (folder / shards[1]).unlink()
    workspace.orchestrate(*join).refused(2, f"{shards[1]} is missing")


def test_types_are_aligned_in_a_file_of_several(tmp_path: Path) -> None:
    tensors = {"a": np.arange(3, dtype="f2"), "b": np.arange(5, dtype="f4"), "c": np.arange(2, dtype="i8")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    write_shards(stored_tensors(tmp_path), tmp_path / "out", "5GB")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: values.tolist() for name, values in actual.items()} == {k: v.tolist() for k, v in tensors.items()}
    offsets = get_local_safetensors_metadata(tmp_path / "out").files_metadata["model.safetensors"].tensors
    assert [offsets[name].data_offsets[0] for name in "cba"] == [0, 16, 36]


def test_the_card_tells_how_the_model_was_trained(workspace: Workspace) -> None:
    train(workspace, "--input", workspace.write_text("secret-folder/book.txt"))
    workspace.orchestrate("export", "--experiment=E", "--format=hf").succeeded()
    card = ModelCard.load(workspace.root / "E-hf" / "README.md")
    assert card.data.to_yaml() == "library_name: transformers\npipeline_tag: text-generation"
    evaluations = workspace.metrics("E", "evaluation")
    last, best = evaluations[-1], min(row["loss"] for row in evaluations)
    state = json.loads((workspace.run_folder("E") / "checkpoints/step-00000004/trainer_state.json").read_text())
    for words in (
        "A language model of 30,912 parameters with the architecture `Qwen3ForCausalLM`",
        f"from random weights for 4 steps ({state['tokens']:,} tokens)",
        'AutoModelForCausalLM.from_pretrained("E-hf", dtype="auto")',
        "| key-value heads | 2 |", "| stored as | F32 |", "local files `book.txt`", "| steps | 4 of 4 |",
        "| batch | 4 sequences of 32 tokens |", "| precision | fp32 |", "AdamW for the rest; betas 0.9 and 0.95",
        "| learning rate | 0.003, wsd, 2 warm-up steps, at least 0 |", f"at step 4: loss {last['loss']:.4f}",
        f"{best:.4f}",
        f"| 2 | {workspace.losses('E')[1]:.4f} |", "Trained with transformer_candle 0.1.0",
    ):  # fmt: skip
        assert words in card.text, words
    assert str(workspace.root) not in card.text
    assert "secret-folder" not in card.text


def test_the_card_names_data_sets_and_weights_of_a_mixture(workspace: Workspace) -> None:
    run = workspace.root / "runs" / "mixed"
    shutil.copytree(GOLDEN, run)
    config = json.loads((run / "resolved_config.json").read_text())
    snapshot = "hub/models--owner--base/snapshots/" + "a" * 40
    config["model"]["init_from"] = f"/home/somebody/{snapshot}"
    hub: dict[str, Any] = {
        "dataset": "HuggingFaceFW/fineweb",
        "config": "sample-10BT",
        "split": None,
        "shards": [],
        "weight": 3.0,
    }
    config["data"]["mixture"][0] |= hub
    (run / "resolved_config.json").write_text(json.dumps(config))
    workspace.orchestrate("export", "--checkpoint=runs/mixed", "--format=hf").succeeded()
    card = ModelCard.load(workspace.root / "mixed-hf" / "README.md")
    assert card.data["datasets"] == ["HuggingFaceFW/fineweb"]
    assert card.data["base_model"] == "owner/base"
    assert "[HuggingFaceFW/fineweb](https://huggingface.co/datasets/HuggingFaceFW/fineweb) | sample-10BT" in card.text
    assert "| 75.0% | 5.1710 |" in card.text
    assert "| local files `few.jsonl` |" in card.text
    assert "| 25.0% | 5.1798 |" in card.text
    assert "from the weights of [owner/base](https://huggingface.co/owner/base) at `aaaaaaaaaaaa`" in card.text
    assert "/home/somebody" not in card.text


def test_the_card_names_the_commit_of_a_streamed_data_set(workspace: Workspace) -> None:
    run = workspace.root / "runs" / "streamed"
    shutil.copytree(GOLDEN, run)
    revision = "c" * 40
    streaming = {"dataset": "owner/web", "split": "train", "max_samples": 30_000, "revision": revision}
    (run / "streaming_config.json").write_text(json.dumps(streaming))
    workspace.orchestrate("export", "--checkpoint=runs/streamed", "--format=hf").succeeded()
    card = ModelCard.load(workspace.root / "streamed-hf" / "README.md")
    assert card.data["datasets"] == ["owner/web"]
    assert f"| train | `{revision}` | the first 30,000 |" in card.text


def test_a_checkpoint_without_its_run_has_a_short_card(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN / "checkpoints" / STEP, workspace.root / "alone")
    workspace.orchestrate("export", "--checkpoint=alone", "--format=hf").succeeded()
    card = (workspace.root / "alone-hf" / "README.md").read_text()
    assert "pre-trained for 4 steps (512 tokens)" in card
    assert "| stored as | BF16 |" in card
    assert "## Data" not in card
    assert "## Training" not in card
    assert "## Evaluation" not in card


def test_wrong_options_are_refused_and_touch_nothing(workspace: Workspace) -> None:
    checkpoint = shutil.copytree(GOLDEN / "checkpoints" / STEP, workspace.root / "alone")
    (workspace.root / "full").mkdir()
    (workspace.root / "full" / "mine.txt").write_text("mine")
    before = sorted(workspace.root.rglob("*"))
    messages = {
        "--format=hf --type=f16": ("--type f16 is for --format gguf",),
        "--format=gguf --max-shard-size=1GB": ("--max-shard-size is for --format hf",),
        "--format=hf --max-shard-size=5GiB": ("--max-shard-size 5GiB", "as 5GB"),
        "--format=hf --max-shard-size=0": ("--max-shard-size 0",),
        "--format=hf --out=full": ("full is not empty",),
        "--format=hf --out=full/mine.txt": ("mine.txt is a file or a link",),
        "--format=hf --out=no/where": ("there is no folder",),
        "--format=hf --experiment=E": ("say one thing to export",),
    }
    for flags, words in messages.items():
        workspace.orchestrate("export", "--checkpoint=alone", *flags.split()).refused(2, *words)
    (checkpoint / "model.safetensors").write_bytes(b"cut")
    workspace.orchestrate("export", "--checkpoint=alone", "--format=hf").refused(5, "model.safetensors")
    assert sorted(workspace.root.rglob("*")) == before


def test_weights_of_another_model_are_checked(workspace: Workspace) -> None:
    model = workspace.root / "model"
    shutil.copytree(GOLDEN / "checkpoints" / STEP, model, ignore=shutil.ignore_patterns("*state*", "MANIFEST*"))
    weights, config = model / "model.safetensors", model / "config.json"
    whole, config_text = weights.read_bytes(), config.read_text()
    export = ["export", "--checkpoint=model", "--format=hf"]
    for content in (whole[:-1], whole[:100], whole[:5], whole[:-2] + b"\xc0\x7f"):
        weights.write_bytes(content)
        workspace.orchestrate(*export).refused(5, "the model in model is corrupted", "download it again")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 14144\n")
    workspace.orchestrate(*export).refused(5, "a pointer of Git LFS", "git lfs pull")
    weights.write_bytes(whole)
    config.write_text(config_text.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    workspace.orchestrate(*export).refused(2, "model.layers.1", "is missing")
    config.write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    workspace.orchestrate(*export).refused(2, "`mixtral`, which has a mixture of experts")
    config.write_text(config_text)
    weights.unlink()
    workspace.orchestrate(*export).refused(2, "neither model.safetensors nor model.safetensors.index.json")
    assert not (workspace.root / "model-hf").exists()


def test_a_tokenizer_of_another_model_is_not_exported(workspace: Workspace) -> None:
    model = workspace.root / "model"
    shutil.copytree(GOLDEN / "checkpoints" / STEP, model, ignore=shutil.ignore_patterns("*state*", "MANIFEST*"))
    tokenizer = model / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    tokenizer.write_text(json.dumps(content))
    export = ["export", "--checkpoint=model", "--format=hf"]
    workspace.orchestrate(*export).refused(
        2, "tokenizer.json has added tokens up to the id 70000", "a vocabulary of 260"
    )
    tokenizer.write_text('{"version":')
    workspace.orchestrate(*export).refused(2, "tokenizer.json cannot be used: ", "EOF")
    workspace.orchestrate("export", "--checkpoint=model/config.json", "--format=hf").refused(
        2, "is a file: name the folder"
    )
    assert not (workspace.root / "model-hf").exists()


def test_a_full_disk_is_a_sentence_and_leaves_no_part(workspace: Workspace) -> None:
    """A limit on the size of files stands for the disk."""
    shutil.copytree(GOLDEN, workspace.root / "runs" / "E")
    limited = f"ulimit -f 8; exec {ORCHESTRATE} export --experiment=E --format=hf"
    workspace.command("sh", "-c", limited).refused(1, "cannot copy", STEP, "File too large")
    assert names(workspace.root) == {"runs"}


def test_a_killed_export_s_folder_is_removed_by_the_next(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN, workspace.root / "runs" / "E")
    for leftover in (".E-hf.tmp-4194305", ".E-hf.tmp-x", f".E-hf.tmp-{os.getpid()}"):
        (workspace.root / leftover).mkdir()
    workspace.orchestrate("export", "--experiment=E", "--format=hf").succeeded()
    assert names(workspace.root) == {"runs", "E-hf", ".E-hf.tmp-x", f".E-hf.tmp-{os.getpid()}"}, "it is running"


@pytest.mark.parametrize(("dtype", "alpha"), [(np.dtype("f4"), 1e40), (np.dtype("f4"), 1e38), (np.dtype("u2"), 3e38)])
def test_merged_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: np.dtype[Any], alpha: float) -> None:
    save_file({"A": np.full((1, 4), 1, "f4"), "B": np.full((4, 1), 1 if dtype == "u2" else 100, "f4")}, tmp_path / "ab")
    (tmp_path / "w").write_bytes(bytes(4 * 4 * dtype.itemsize))
    pair = tensors_of_file(tmp_path / "ab")
    kind, size = {"f4": "F32", "u2": "BF16"}[dtype.str[1:]], 16 * dtype.itemsize
    tensor = MergedTensor(kind, [4, 4], 16, tmp_path / "w", 0, size, down=pair["A"], up=pair["B"], scale=alpha)
    if kind == "BF16":
        # The largest f32 below bf16's range rounds up to infinity.
        tensor = dataclasses.replace(tensor, scale=float(np.nextafter(np.float32(np.inf), np.float32(0))))
    with pytest.raises(CommandError, match="not finite, 16 of 16") as refusal:
        list(tensor.pieces())
    assert refusal.value.code == 5


def test_a_finished_run_is_not_prepared_again(workspace: Workspace) -> None:
    shutil.copytree(GOLDEN, workspace.root / "runs" / "E")
    tokenizer = workspace.run_folder("E") / "tokenizer/tokenizer.json"
    before = tokenizer.read_bytes() if tokenizer.exists() else None
    arguments = [*TINY_MODEL, f"--input={workspace.write_text()}", "--experiment=E", "--launch=none"]
    workspace.orchestrate(*arguments).refused(2, "holds the checkpoints of an earlier run", "--resume")
    assert (tokenizer.read_bytes() if tokenizer.exists() else None) == before


def test_ctrl_c_leaves_neither_the_folder_nor_a_part(workspace: Workspace) -> None:
    model = workspace.root / "model"
    shutil.copytree(GOLDEN / "checkpoints" / STEP, model, ignore=shutil.ignore_patterns("*state*", "MANIFEST*"))
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    large = {"dtype": "U8", "shape": [1 << 32], "data_offsets": [len(content) - data, len(content) - data + (1 << 32)]}
    # 4 GiB that take no room on the disk, as a tensor that every model may have and none needs.
    header = json.dumps({**json.loads(content[8:data]), "model.rotary_emb.inv_freq": large}).encode()
    with weights.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + content[data:])
        file.truncate(8 + len(header) + len(content) - data + (1 << 32))
    process = workspace.start(ORCHESTRATE, "export", "--checkpoint=model", "--format=hf")
    while not any(path.name.startswith(".model-hf.tmp") for path in workspace.root.iterdir()):
        assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130, out
    assert "stopped by Ctrl-C" in out
    assert names(workspace.root) == {"model"}
