"""Exported models in llama.cpp: the same tokens, the same greedy continuation, the same loss."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from llama_cpp_server import llama_cpp
from tiny_models import LLAMA_3, MODELS, SIZES, make_model, write_tokenizer
from tokenizers import Tokenizer
from workspace import Workspace

CONFIG = """
model: {{init_from: {model}}}
data: {{train_shards: [{text}], sequence_length: 64, batch_size: 4, sequences_per_step: 8, shuffle_buffer_size: 64}}
optimizer: {{learning_rate: 3.0e-3}}
scheduler: {{strategy: cosine, warmup_steps: 5, total_steps: 60}}
runtime: {{device: cpu, precision: fp32, checkpoint: {{every_n_steps: 60}}}}
"""
PROMPT = "def main(arguments):\n    return 12345 + len('caf\u00e9 \u4e2d\u6587') # it's\t\U0001f642\n"
POSITIONS = 24


def trained(workspace: Workspace, name: str) -> Path:
    """Return a checkpoint after 60 steps: in an untrained model the most likely tokens nearly tie."""
    text = workspace.root / "text.jsonl"
    texts = list(documents())[:300]
    text.write_text("".join(json.dumps({"text": content}) + "\n" for content in texts))
    model = make_model(name, workspace.root / name)
    write_tokenizer(name, texts, model)
    config = workspace.root / "run" / "training.yaml"
    config.parent.mkdir()
    config.write_text(CONFIG.format(model=model, text=text))
    workspace.orchestrate("train", "--config", config).succeeded()
    return config.parent / "checkpoints" / "step-00000060"


def our_loss(checkpoint: Path, tokens: list[int]) -> float:
    logits = orchestrator.logits(checkpoint, tokens[:-1], device="cpu").astype(np.float64)
    maxima = logits.max(axis=1)
    log_sums = maxima + np.log(np.exp(logits - maxima[:, None]).sum(axis=1))
    return float(np.mean(log_sums - logits[np.arange(len(tokens) - 1), tokens[1:]]))


def export(workspace: Workspace, checkpoint: Path, kind: str) -> Path:
    file = workspace.root / f"{kind}.gguf"
    flags = ["export", "--checkpoint", checkpoint, "--format=gguf", f"--type={kind}", "--out", file]
    workspace.command(workspace.python, "-m", "orchestrator", *flags).succeeded()
    return file


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_we_compute(workspace: Workspace, name: str) -> None:
    checkpoint = trained(workspace, name)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tiny_tokenizers.encode(tokenizer, PROMPT)
    greedy = orchestrator.generate(checkpoint, PROMPT, max_tokens=40, temperature=0.0).tokens
    loss = our_loss(checkpoint, ids[:POSITIONS])
    with llama_cpp(export(workspace, checkpoint, "f32")) as server:
        assert server.tokenize(PROMPT, add_special=True) == ids
        theirs = server.complete(ids, 40, 1)["tokens"]
        assert theirs[: len(greedy)] == greedy
        assert len(greedy) == 40
        assert server.loss(ids[:POSITIONS], SIZES["vocab_size"]) == pytest.approx(loss, abs=1e-5)
    for kind, tolerance in (("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 1e-2)):
        with llama_cpp(export(workspace, checkpoint, kind)) as server:
            assert server.loss(ids[:POSITIONS], SIZES["vocab_size"]) == pytest.approx(loss, rel=tolerance), kind


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_tokenizers_of_open_models_give_the_same_tokens(workspace: Workspace, kind: str) -> None:
    texts = list(documents())[:300]
    folder = make_model("llama_2", workspace.root / "model", vocab_size=700)
    tokenizer = tiny_tokenizers.train(kind, texts, 700)
    tiny_tokenizers.write(tokenizer, kind, folder)
    parts = [*(text[:300] for text in texts[::30]), PROMPT, "two  spaces", "\u00e9\u4e2d\U0001f642\x07"]
    parts += ["1234567 in 2024: 3.14", "\u00c9COLE \u00c9cole McDonald's/a//b"]
    # Metaspace, unlike llama.cpp, puts no space in front of one.
    parts += [" two  spaces"] * (kind != "mistral")
    with llama_cpp(export(workspace, folder, "f32")) as server:
        for text in parts:
            assert server.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_what_cannot_be_exported_is_refused(workspace: Workspace) -> None:
    original = make_model("qwen_2", workspace.root / "original")
    write_tokenizer("qwen_2", list(documents())[:100], original)
    split = {"type": "Split", "pattern": {"Regex": "[a-z]"}, "behavior": "Isolated", "invert": False}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    llama3 = {**LLAMA_3, "rope_type": "llama3"}
    shard = sorted(original.glob("model-*.safetensors"))[1].name
    changes: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
        ("tokenizer.json", {"pre_tokenizer": split}, 2, ("llama.cpp has no name for", "[a-z]")),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, 2, ("llama.cpp has no name for", "Lowercase")),
        ("config.json", {"model_type": "gemma"}, 2, ("`model_type` is `gemma`",)),
        ("config.json", {"rope_parameters": yarn}, 2, ("`rope_parameters` is of type `yarn`",)),
        ("config.json", {"rope_parameters": llama3}, 2, ("scales its rotary angles", "qwen2")),
        ("config.json", {"intermediate_size": 128}, 2, ("has shape [96, 64], the model's has [128, 64]",)),
        ("config.json", {"num_hidden_layers": 4}, 2, ("model.layers.3", "is missing")),
        ("config.json", {"num_hidden_layers": 2}, 2, ("model.layers.2", "is in the file, but not in the model")),
    ]
    for number, (name, keys, code, words) in enumerate(changes):
        model = shutil.copytree(original, workspace.root / f"model-{number}")
        change(model / name, **keys)
        refused(workspace, model, code, *words)

    whole = (original / shard).read_bytes()
    for code, content, words in (
        (5, whole[:-5], ("bytes of tensors",)),
        (5, whole[:-4] + b"\x00\x00\xc0\x7f", ("not finite",)),
        (5, b"version https://git-lfs.github.com/spec/v1", (shard,)),
    ):
        (original / shard).write_bytes(content)
        refused(workspace, original, code, shard, *words)
    (original / shard).unlink()
    refused(workspace, original, 2, f"{shard} is missing")


def test_a_tokenizer_of_another_model_is_refused(workspace: Workspace) -> None:
    model = make_model("llama_2", workspace.root / "model")
    larger = tiny_tokenizers.train("llama_2", list(documents())[:100], 500)
    tiny_tokenizers.write(larger, "llama_2", model)
    refused(workspace, model, 2, "tokenizer.json has the id 499", "a vocabulary of 384")
    write_tokenizer("llama_2", list(documents())[:100], model)
    change(model / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})
    refused(workspace, model, 2, "llama.cpp has no name for", "Whitespace")
    (model / "tokenizer.json").unlink()
    refused(workspace, model, 2, "tokenizer.json", "there is none")


def refused(workspace: Workspace, model: Path, code: int, *words: str) -> None:
    export_arguments = ["export", "--checkpoint", model, "--format=gguf", "--out", workspace.root / "out.gguf"]
    workspace.command(workspace.python, "-m", "orchestrator", *export_arguments).refused(code, *words)
    assert not list(workspace.root.glob("*out.gguf*"))


def test_only_files_of_ours_are_replaced(workspace: Workspace) -> None:
    checkpoint, out = trained(workspace, "llama_2"), workspace.root / "out.gguf"
    ours = [workspace.python, "-m", "orchestrator", "export", "--format=gguf", "--checkpoint", checkpoint, "--out", out]
    workspace.command(*ours).succeeded()
    exported_bytes = out.read_bytes()
    (workspace.root / ".out.gguf.tmp-4194305").write_bytes(exported_bytes)
    workspace.command(*ours).succeeded()
    assert [path.name for path in workspace.root.glob("*out.gguf*")] == ["out.gguf"], "no part is left"
    for content in (b"mine", b"GGUF" + bytes(600)):
        out.write_bytes(content)
        workspace.command(*ours).refused(2, "no export of this program", "--overwrite")
        assert out.read_bytes() == content
    workspace.command(*ours, "--overwrite").succeeded()
    assert out.read_bytes() == exported_bytes
    target = out.rename(workspace.root / "target")
    out.symlink_to(target)
    workspace.command(*ours, "--overwrite").refused(2, "a link, a pipe or a device")
    out.unlink()
    os.mkfifo(out)
    workspace.command(*ours, "--overwrite").refused(2, "a link, a pipe or a device")
    assert out.is_fifo() and target.read_bytes() == exported_bytes


def test_wrong_commands_write_nothing(workspace: Workspace) -> None:
    checkpoint = trained(workspace, "llama_2")
    flags = ["export", "--format=gguf", "--checkpoint", checkpoint]
    ours = [workspace.python, "-m", "orchestrator", *flags]
    workspace.command(*ours, "--out=/nowhere/model.gguf").refused(2, "there is no folder")
    workspace.command(*ours, "--experiment=first").refused(2, "--experiment NAME or --checkpoint DIR")
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(workspace, checkpoint, 5, "corrupted")
