"""A model that people use, SmolLM2-135M-Instruct: losses, answers, adapters and exports are those of other programs.

Random models of a few layers do not have what a trained one has: outlier weights, attention sinks, close calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub import FakeHub, Repository
from fake_hub.fineweb import documents
from llama_cpp_server import llama_cpp
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from real_model import smollm2
from safetensors.torch import load_file
from test_finetuning_guide import DATASET, SMALL, rows
from test_model_guides import commands, orchestrate
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Workspace

SEQUENCE = 64
STEPS = 5
LEARNING_RATE = 1e-3
CONFIG = """
model: {{init_from: {model}}}
lora: {{rank: 8, alpha: 16}}
data: {{train_shards: [{root}/train.jsonl], validation_shards: [{root}/held_out.jsonl], sequence_length: 64,
       batch_size: 2, gradient_accumulation_steps: 1, shuffle_buffer_size: 16}}
optimizer: {{learning_rate: 1.0e-3, max_grad_norm: null, weight_decay: 0.0}}
scheduler: {{strategy: constant, warmup_steps: 0, total_steps: 5, min_lr: 1.0e-3}}
runtime: {{device: cpu, precision: {precision}, checkpoint: {{every_n_steps: 5}},
          evaluation: {{every_n_steps: 5, max_batches: 4}}}}
"""
PROMPT = "The river bends because"
QUESTIONS = ["What is the capital of France?", "How many legs has a spider?", "Name a colour of the sky."]


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.getbasetemp().parent)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(theirs: Any, ids: list[int], count: int) -> list[int]:
    """Return the most likely tokens after `ids`, without those that end the answer."""
    generated_ids = theirs.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=2)[
        0, len(ids) :
    ]
    return [token for token in generated_ids.tolist() if token != theirs.config.eos_token_id]


def logits(theirs: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        values: np.ndarray = theirs(torch.tensor([ids])).logits[0].float().numpy()
    return values


def rms(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference))))


def conversation(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    return ids


def test_greedy_tokens_are_those_of_transformers(model: Path) -> None:
    theirs, tokenizer = load(model), AutoTokenizer.from_pretrained(model)
    texts = "\n\n".join(documents())
    long = tokenizer.decode(tokenizer(texts[:12_000]).input_ids[:2_040])
    for prompt, count in ((PROMPT, 64), (long, 8)):
        ids = tokenizer(prompt).input_ids
        ours = orchestrator.generate(model, prompt, max_tokens=count, temperature=0.0, device="cpu")
        assert ours.tokens == greedy(theirs, ids, count)
        assert len(ours.tokens) == count


def test_answers_are_those_of_transformers(workspace: Workspace, model: Path) -> None:
    theirs, tokenizer = load(model), AutoTokenizer.from_pretrained(model)
    chat = ["chat", "--checkpoint", model, "--device=cpu", "--temperature=0", "--max-tokens=32", "--once"]
    for question in QUESTIONS:
        expected = tokenizer.decode(greedy(theirs, conversation(tokenizer, question), 32))
        assert workspace.orchestrate(*chat, question).succeeded().out == expected + "\n"


def held_out_loss(theirs: Any, tokenizer: Any, path: Path, sequences: int) -> float:
    """Return the loss of transformers' model on the documents of `path`, each ended by `<|endoftext|>`."""
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokens = [end]
    for line in path.read_text().splitlines():
        tokens += [*tokenizer(json.loads(line)["text"]).input_ids, end]
    ids = torch.tensor(tokens[: sequences * SEQUENCE + 1])
    with torch.no_grad():
        logits = theirs(ids[:-1].view(sequences, SEQUENCE)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_evaluation_and_lora_steps_are_those_of_peft(
    workspace: Workspace, model: Path, precision: str, tolerance: float
) -> None:
    texts = list(documents())[:100]
    for name, part in (("train.jsonl", texts[10:]), ("held_out.jsonl", texts[:10])):
        (workspace.root / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    path = workspace.root / "training.yaml"
    path.write_text(CONFIG.format(model=model, root=workspace.root, precision=precision))
    config = orchestrator.RunConfig.load(path)
    trainer = orchestrator.Trainer(config)
    theirs = load(model)
    if precision == "bf16":
        theirs = theirs.bfloat16().float()  # the same weights, computed with in f32
    evaluation = trainer.evaluate()
    assert evaluation
    expected = held_out_loss(theirs, AutoTokenizer.from_pretrained(model), workspace.root / "held_out.jsonl", 8)
    assert evaluation.loss == pytest.approx(expected, abs=tolerance)

    start = load_file(trainer.save() / "adapter_model.safetensors")
    peft_model = get_peft_model(theirs, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    parameters = {key: value for key, value in peft_model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for key, value in parameters.items():
            value.copy_(start[key.replace(".default", "")])
    optimizer = torch.optim.AdamW(parameters.values(), LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    stream = orchestrator.TokenStream(config)
    losses = []
    for _ in range(STEPS):
        inputs, targets = (torch.from_numpy(part).long() for part in next(stream))
        loss = torch.nn.functional.cross_entropy(peft_model(inputs).logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        assert next(trainer).loss == pytest.approx(losses[-1], abs=tolerance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1, "nothing was learnt, so that nothing is compared"


def compare(checkpoint: Path, folders: tuple[Path, Path], ids: list[int], precision: str) -> None:
    """Check that peft's and transformers' logits of what was exported are those of the checkpoint."""
    adapter_folder, merged_folder = folders
    ours = orchestrator.logits(checkpoint, ids, device="cpu")
    expected = logits(load(merged_folder), ids)
    peft = AutoPeftModelForCausalLM.from_pretrained(adapter_folder, dtype=torch.float32)
    np.testing.assert_allclose(logits(peft, ids), expected, atol=1e-3)
    if precision == "fp32":
        np.testing.assert_allclose(ours, expected, atol=1e-3)
    else:
        rounded = logits(AutoModelForCausalLM.from_pretrained(merged_folder, dtype=torch.bfloat16), ids)
        assert rms(ours - expected) < 1.5 * rms(rounded - expected)


def test_the_commands_of_the_guide_work(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "hub"
    data = Repository(root, "datasets", DATASET).folder
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(rows(40))
    with FakeHub(root) as hub:
        workspace = Workspace(tmp_path, hub.environment(tmp_path / "hf"))
        (workspace.root / "conversations.jsonl").write_text(rows(40))
        for words in commands("fine-tuning.md"):
            arguments = [{"$MODEL": str(model), "$DATA": DATASET}.get(word, word) for word in words]
            small = {"finetune": SMALL, "chat": ["--device=cpu", "--max-tokens=8"]}.get(words[0], [])
            # The model has no repository to push to. Other runs than the guide's first are made with a small model.
            if words[0] != "push" and (words[0] != "finetune" or "capybara" in words):
                orchestrate(workspace, *arguments, *small).succeeded()

    ids = conversation(AutoTokenizer.from_pretrained(model), QUESTIONS[0])
    checkpoint = workspace.run_folder("capybara") / "checkpoints" / "step-00000004"
    merged_folder = workspace.root / "capybara-hf"
    compare(checkpoint, (workspace.root / "capybara-adapter", merged_folder), ids, "fp32")
    before = orchestrator.logits(model, ids, device="cpu")
    assert np.abs(logits(load(merged_folder), ids) - before).max() > 0.1, "nothing was learnt"
    expected = greedy(load(merged_folder), ids, 24)
    assert expected
    f32 = workspace.root / "f32.gguf"
    orchestrate(workspace, "export", "--experiment=capybara", "--format=gguf", "--merge", "--out", f32).succeeded()
    with llama_cpp(f32) as server:
        assert server.complete(ids, 24, 1)["tokens"][: len(expected)] == expected


def test_bf16_exports_compute_what_the_run_computes(workspace: Workspace, model: Path) -> None:
    data = workspace.root / "conversations.jsonl"
    data.write_text(rows(40))
    finetune = ["finetune", "--model", model, "--input", data, "--precision=bf16", "--lora-rank=16", *SMALL]
    workspace.orchestrate(*finetune, "--experiment=short").succeeded()
    adapter, merged = workspace.root / "adapter", workspace.root / "merged"
    orchestrate(workspace, "export", "--experiment=short", "--format=adapter", "--out", adapter).succeeded()
    orchestrate(workspace, "export", "--experiment=short", "--format=hf", "--merge", "--out", merged).succeeded()
    ids = conversation(AutoTokenizer.from_pretrained(model), QUESTIONS[0])
    compare(workspace.run_folder("short") / "checkpoints" / "step-00000004", (adapter, merged), ids, "bf16")
