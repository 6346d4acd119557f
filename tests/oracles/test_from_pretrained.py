"""A checkpoint directory is a Hugging Face Llama model: transformers loads it and computes what we compute."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import orchestrator
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import TINY_MODEL, Workspace

PROMPT = "def main(arguments):\n    return"


def trained(workspace: Workspace, precision: str, tied: bool) -> Path:
    """Train a short run; return its last checkpoint."""
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=200", "--seq-len=96", f"--precision={precision}"]
    flags += ["--override", f"model.tie_embeddings={str(tied).lower()}", "--experiment=model"]
    workspace.orchestrate(*flags).succeeded()
    return workspace.run_folder("model") / "checkpoints" / "step-00000200"


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_greedy_text_equal_transformers(workspace: Workspace, tied: bool) -> None:
    checkpoint = trained(workspace, "fp32", tied)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.tie_word_embeddings is tied
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == PROMPT

    with torch.no_grad():
        theirs = model(input_ids=ids).logits[0].numpy()
    ours = orchestrator.logits(checkpoint, ids[0].tolist())
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=1e-4)

    greedy = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    ask = ["generate", "--checkpoint", checkpoint, "--prompt", PROMPT, "--max-tokens=24", "--temperature=0", "--json"]
    answer = json.loads(workspace.trainer(*ask).succeeded().out)
    stop = tokenizer.eos_token_id
    assert [token for token in answer["tokens"] if token != stop] == [t for t in greedy.tolist() if t != stop]


def test_a_bf16_checkpoint_loads_in_bf16(workspace: Workspace) -> None:
    checkpoint = trained(workspace, "bf16", tied=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert model.dtype == torch.bfloat16
    ids = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        exact = model.float()(input_ids=ids).logits[0].numpy()
    ours = orchestrator.logits(checkpoint, ids[0].tolist())
    error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert error < 0.02


def test_exported_shards_have_the_checkpoints_weights(workspace: Workspace) -> None:
    checkpoint = trained(workspace, "bf16", tied=False)
    export = ["export", "--experiment=model", "--format=hf", "--max-shard-size=40KB"]
    printed_command = workspace.orchestrate(*export).succeeded().out.partition("try it     python ")[2]
    folder = workspace.root / "model-hf"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    original, exported_model = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (checkpoint, folder)
    )
    assert exported_model.dtype == torch.bfloat16
    weights = exported_model.state_dict()
    assert weights.keys() == original.state_dict().keys()
    assert all(torch.equal(weights[name], values) for name, values in original.state_dict().items())
    ids = [AutoTokenizer.from_pretrained(path)(PROMPT).input_ids for path in (checkpoint, folder)]
    assert ids[0] == ids[1]
    (example,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    for command in ([sys.executable, "-c", example], ["sh", "-c", f"{sys.executable} {printed_command}"]):
        assert workspace.command(*command).succeeded().out.startswith("Once upon a time")


def test_transformers_loads_the_experiments_tokenizer(workspace: Workspace) -> None:
    flags = [*TINY_MODEL, "--stream", "--dataset=demo", "--experiment=made", "--launch=none"]
    workspace.orchestrate(*flags).succeeded()
    folder = workspace.root / "artifacts/tokenizer/made"
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (PROMPT, "  It's 1 of 22 caf\u00e9s \u4e2d\u6587\U0001f642\r\n\t "):
        assert theirs(text).input_ids == ours.encode(text).ids
        assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token, theirs.pad_token, len(theirs)) == ("<|endoftext|>", "<|pad|>", ours.get_vocab_size())
