"""LoRA beside peft: the same losses and adapters for twenty steps, and each loads the adapters of the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub.fineweb import documents
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import make_model, write_tokenizer
from transformers import AutoModelForCausalLM
from workspace import Workspace

STEPS = 20
LEARNING_RATE = 1e-3
TOKENS = list(range(5, 105))
TEXTS = list(documents())[:200]
CONFIG = """
model: {{init_from: {model}}}
lora: {lora}
data: {{train_shards: [{text}], sequence_length: 64, batch_size: 2, gradient_accumulation_steps: 2,
       shuffle_buffer_size: 16}}
optimizer: {{learning_rate: 1.0e-3, max_grad_norm: null, weight_decay: 0.01}}
scheduler: {{strategy: constant, warmup_steps: 0, total_steps: 20, min_lr: 1.0e-3}}
runtime: {{device: cpu, precision: fp32, checkpoint: {{every_n_steps: 20, max_keep: 3}}}}
"""
SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama_3", {"rank": 4, "alpha": 8}, {"target_modules": "all-linear"}),
    ("llama_2", {"rank": 4, "alpha": 8, "rslora": True, "target_modules": ["v_proj", "up_proj"]}, {}),
    ("qwen_2", {"rank": 2, "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}, {}),
]


@pytest.fixture
def text(workspace: Workspace) -> Path:
    path = workspace.root / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def make_run(workspace: Workspace, model: Path, text: Path, lora: dict[str, Any]) -> orchestrator.RunConfig:
    path = workspace.root / "run" / "training.yaml"
    path.parent.mkdir()
    path.write_text(CONFIG.format(model=model, text=text, lora=json.dumps(lora)))
    return orchestrator.RunConfig.load(path)


def base(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].numpy()


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(("name", "lora", "adapter_config"), SETTINGS)
def test_twenty_steps_are_those_of_peft(
    workspace: Workspace, text: Path, name: str, lora: dict[str, Any], adapter_config: dict[str, Any]
) -> None:
    folder = make_model(name, workspace.root / name)
    write_tokenizer(name, TEXTS, folder)
    config = make_run(workspace, folder, text, lora)
    trainer = orchestrator.Trainer(config)
    start = trainer.save()

    theirs = PeftModel.from_pretrained(base(folder), start, is_trainable=True)
    trainable = {key for key, value in theirs.named_parameters() if value.requires_grad}
    assert trainable == {key.replace(".weight", ".default.weight") for key in adapters(start)}
    target_modules = adapter_config.get("target_modules", lora.get("target_modules"))
    peft_made = get_peft_model(base(folder), LoraConfig(r=lora["rank"], target_modules=target_modules))
    assert trainable == {key for key, value in peft_made.named_parameters() if value.requires_grad}
    np.testing.assert_allclose(orchestrator.logits(start, TOKENS, device="cpu"), logits(theirs), atol=1e-4)

    parameters = [value for value in theirs.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    theirs.train()
    stream = orchestrator.TokenStream(config)
    for _ in range(STEPS):
        inputs, targets = (torch.from_numpy(part).long() for part in next(stream))
        loss = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
        assert next(trainer).loss == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    checkpoint = trainer.save()
    their_values = {
        key.replace(".default", ""): value for key, value in theirs.named_parameters() if value.requires_grad
    }
    ours = adapters(checkpoint)
    assert ours.keys() == their_values.keys()
    for key, value in ours.items():
        assert (value - their_values[key]).abs().max() < 1e-5, key
        assert (value - adapters(start)[key]).abs().max() > 1e-3, f"{key} has not moved"

    reloaded_model = PeftModel.from_pretrained(base(folder), checkpoint)
    np.testing.assert_allclose(orchestrator.logits(checkpoint, TOKENS, device="cpu"), logits(reloaded_model), atol=1e-4)
    assert np.abs(logits(reloaded_model) - logits(base(folder))).max() > 1e-3


def test_training_goes_on_from_peft_s_adapters(workspace: Workspace, text: Path) -> None:
    folder = make_model("llama_2", workspace.root / "model")
    write_tokenizer("llama_2", TEXTS, folder)
    torch.manual_seed(3)
    theirs = get_peft_model(
        base(folder), LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    theirs.peft_config["default"].base_model_name_or_path = str(folder)
    theirs.save_pretrained(workspace.root / "adapters")
    np.testing.assert_allclose(
        orchestrator.logits(workspace.root / "adapters", TOKENS, device="cpu"), logits(theirs), atol=1e-4
    )

    config = make_run(workspace, folder, text, {"init_from": str(workspace.root / "adapters")})
    trainer = orchestrator.Trainer(config)
    start = trainer.save()
    start_adapters = adapters(workspace.root / "adapters")
    assert start_adapters.keys() == adapters(start).keys()
    assert all(torch.equal(value, start_adapters[key]) for key, value in adapters(start).items())
    next(trainer)
    assert any(not torch.equal(value, start_adapters[key]) for key, value in adapters(trainer.save()).items())


def test_bf16_adapters_are_loaded_by_peft(workspace: Workspace, text: Path) -> None:
    folder = make_model("qwen_3", workspace.root / "model", torch.bfloat16)
    write_tokenizer("qwen_3", TEXTS, folder)
    make_run(workspace, folder, text, {"rank": 4})
    config = workspace.root / "run" / "training.yaml"
    flags = ("--override=runtime.precision=bf16", "--override=scheduler.total_steps=5")
    workspace.orchestrate("train", "--config", config, *flags).succeeded()
    checkpoint = config.parent / "checkpoints" / "step-00000005"
    assert {value.dtype for value in adapters(checkpoint).values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = logits(PeftModel.from_pretrained(model, checkpoint, autocast_adapter_dtype=False).float())
    actual = np.array(orchestrator.logits(checkpoint, TOKENS, device="cpu"))
    assert np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()
