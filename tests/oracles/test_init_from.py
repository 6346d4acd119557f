"""Training from models that transformers made: the same logits, loss and gradients, and saved as what they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub.fineweb import documents
from safetensors.torch import load_file
from tiny_models import MODELS, make_model, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Finished, Workspace

SEQUENCE = 64
EVALUATED = 8
"""Sequences of an evaluation: two steps of four."""
CONFIG = """
model: {{init_from: {model}}}
data: {{train_shards: [{text}], validation_shards: [{held_out}], sequence_length: 64,
       batch_size: 2, gradient_accumulation_steps: 2, shuffle_buffer_size: 16}}
optimizer: {{learning_rate: 1.0e-3, max_grad_norm: null, weight_decay: 0.0}}
scheduler: {{strategy: constant, warmup_steps: 0, total_steps: 1}}
runtime: {{device: cpu, precision: fp32, checkpoint: {{every_n_steps: 1}},
          evaluation: {{every_n_steps: 1, max_batches: 2}}}}
"""


@pytest.fixture
def text(workspace: Workspace) -> Path:
    """Documents to train on; ten others lie beside them, held out."""
    texts = list(documents())[:200]
    for name, part in (("train.jsonl", texts[10:]), ("held_out.jsonl", texts[:10])):
        (workspace.root / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return workspace.root / "train.jsonl"


def texts_of(text: Path) -> list[str]:
    return [json.loads(line)["text"] for line in text.read_text().splitlines()]


def held_out_loss(model: torch.nn.Module, folder: Path, text: Path) -> float:
    """Return the loss of transformers' model on the held-out documents, encoded by its tokenizer, cut in sequences."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [tokenizer.eos_token_id]
    for document in texts_of(text.with_name("held_out.jsonl")):
        tokens += [*tokenizer(document).input_ids, tokenizer.eos_token_id]
    count = min(EVALUATED, (len(tokens) - 1) // SEQUENCE)
    ids = torch.tensor(tokens[: count * SEQUENCE + 1])
    with torch.no_grad():
        logits = model(ids[:-1].view(count, SEQUENCE)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item()


def run_config(workspace: Workspace, model: Path, text: Path, *overrides: str) -> orchestrator.RunConfig:
    path = workspace.root / "run" / "training.yaml"
    path.parent.mkdir()
    path.write_text(CONFIG.format(model=model, text=text, held_out=text.with_name("held_out.jsonl")))
    return orchestrator.RunConfig.load(path, overrides=list(overrides))


@pytest.mark.parametrize("name", MODELS)
def test_training_starts_from_the_very_model(workspace: Workspace, text: Path, name: str) -> None:
    folder = make_model(name, workspace.root / name)
    write_tokenizer(name, texts_of(text), folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(range(5, 105))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(orchestrator.logits(folder, tokens, device="cpu"), expected, atol=1e-4)

    config = run_config(workspace, folder, text)
    inputs, targets = (torch.from_numpy(part).long() for part in next(orchestrator.TokenStream(config)))
    loss = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    trainer = orchestrator.Trainer(config)
    evaluation = trainer.evaluate()
    assert evaluation
    assert evaluation.loss == pytest.approx(held_out_loss(theirs, folder, text), abs=1e-4)
    report = next(trainer)
    assert report.loss == pytest.approx(loss.item(), abs=1e-4)

    checkpoint = trainer.save()
    # Before clipping and without bias correction, the first moment is a tenth of the gradient.
    moments = load_file(checkpoint / "optimizer.safetensors")
    gradients = {parameter: value.grad for parameter, value in theirs.named_parameters()}
    for parameter, gradient in gradients.items():
        scaled_moment = 10 * moments[f"{parameter}.first_moment"]
        assert (scaled_moment - gradient).norm() < 1e-5 * gradient.norm() + 1e-9, parameter

    reloaded_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert type(reloaded_model) is type(theirs)
    ends = reloaded_model.generation_config.eos_token_id
    expected_ends = dict.fromkeys([AutoTokenizer.from_pretrained(folder).eos_token_id, theirs.config.eos_token_id])
    assert (ends if isinstance(ends, list) else [ends]) == list(expected_ends), "the model's own stop tokens are kept"
    with torch.no_grad():
        expected = reloaded_model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(orchestrator.logits(checkpoint, tokens, device="cpu"), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_the_command_evaluates_before_the_first_step(workspace: Workspace, text: Path, dtype: torch.dtype) -> None:
    folder = make_model("llama_3", workspace.root / "model", dtype)
    write_tokenizer("llama_3", texts_of(text), folder)
    config = Path(run_config(workspace, folder, text).path)
    out = workspace.orchestrate("train", "--config", config, "--override=runtime.precision=bf16").succeeded().out
    assert f"training starts from the weights in {folder}" in out
    lines = (config.parent / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert (first["kind"], first["step"]) == ("evaluation", 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert first["loss"] == pytest.approx(held_out_loss(model, folder, text), rel=2e-3)

    (folder / "config.json").unlink()
    resumed_run = workspace.orchestrate("train", "--config", config, "--resume", "--override=runtime.precision=bf16")
    resumed_run.succeeded()


def test_a_tied_model_with_a_head_of_its_own_is_refused(workspace: Workspace, text: Path) -> None:
    folder = make_model("llama_2", workspace.root / "model")
    write_tokenizer("llama_2", texts_of(text), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight), "transformers computes with both"
    config = Path(run_config(workspace, folder, text).path)
    differs = ("`tie_word_embeddings` is true, but `lm_head.weight` differs", "set it to false")
    workspace.orchestrate("train", "--config", config).refused(2, *differs)
    workspace.trainer("generate", "--checkpoint", folder, "--prompt=def").refused(2, *differs)


def test_what_does_not_fit_is_refused(workspace: Workspace, text: Path) -> None:
    folder = make_model("llama_2", workspace.root / "model")
    write_tokenizer("llama_2", texts_of(text), folder)
    config = Path(run_config(workspace, folder, text).path)

    def train(*flags: str) -> Finished:
        return workspace.orchestrate("train", "--config", config, *flags)

    train("--override=model.hidden_size=32").refused(2, "model.hidden_size: is 32, but the model in", "has 64")
    nowhere = train("--override=model.init_from=/nowhere")
    nowhere.refused(2, "/nowhere/config.json: there is no such file")
    assert "is missing" not in nowhere.err, "the keys that the model would have given"
    assert "tokenizer" not in nowhere.err
    original = (folder / "config.json").read_text()
    (folder / "config.json").write_text(original.replace('"llama"', '"gemma"'))
    train().refused(2, "`model_type` is `gemma`", "`llama`, `mistral`, `qwen2`, `qwen3`")
    (folder / "config.json").write_text(original.replace('"intermediate_size": 96', '"intermediate_size": 128'))
    train().refused(2, "gate_proj.weight` has shape [96, 64], the model's has [128, 64]")
    (folder / "config.json").write_text(original)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    train().refused(5, shard.name, "bytes of tensors")
    shard.write_bytes(whole[:-4] + b"\x00\x00\xc0\x7f")
    train().refused(5, shard.name, "not finite")
    shard.unlink()
    train().refused(2, f"{shard.name} is missing")
    assert not (config.parent / "checkpoints").exists()
    shard.write_bytes(whole)
    train().succeeded()
