"""Adapters that leave the run: peft loads them, and what is merged computes what peft's merged model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import torch
from fake_hub import FakeHub
from fake_hub.fineweb import documents
from huggingface_hub import ModelCard
from llama_cpp_server import llama_cpp
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_gguf import our_loss
from tiny_models import SIZES, make_model, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Finished, Workspace

TOKENS = list(range(5, 85))
TEXTS = list(documents())[:200]
CONFIG = """
model: {{init_from: {model}}}
lora: {lora}
data: {{train_shards: [{text}], sequence_length: 64, batch_size: 2, gradient_accumulation_steps: 2,
       shuffle_buffer_size: 16}}
optimizer: {{learning_rate: 1.0e-2, weight_decay: 0.0}}
scheduler: {{strategy: constant, warmup_steps: 0, total_steps: 12}}
runtime: {{device: cpu, precision: {precision}, checkpoint: {{every_n_steps: 6}},
          evaluation: {{every_n_steps: 6, max_batches: 2}}}}
"""
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama_3", {"rank": 4, "alpha": 8}),  # tied
    ("llama_2", {"rank": 4, "alpha": 8, "rslora": True, "target_modules": ["v_proj", "up_proj"]}),
    ("qwen_2", {"rank": 2, "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}),
]


def trained(
    workspace: Workspace, model: Path, lora: dict[str, Any], precision: str = "fp32", name: str = "tuned"
) -> Path:
    """Train adapters beside a model of `make_model`; return the run's folder."""
    text = workspace.root / "train.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = workspace.run_folder(name) / "training.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG.format(model=model, text=text, lora=json.dumps(lora), precision=precision))
    workspace.orchestrate("train", "--config", config).succeeded()
    return config.parent


def base_model(workspace: Workspace, name: str, dtype: torch.dtype = torch.float32) -> Path:
    folder = make_model(name, workspace.root / "base", dtype)
    write_tokenizer(name, TEXTS, folder)
    return folder


def export(workspace: Workspace, *flags: str | Path) -> Finished:
    """Run `orchestrate export` of this environment, which has `[export]`."""
    return workspace.command(workspace.python, "-m", "orchestrator", "export", *flags)


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        values: np.ndarray = model.float().eval()(torch.tensor([TOKENS])).logits[0].numpy()
    return values


def load(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(("name", "lora"), SETTINGS)
def test_peft_and_transformers_compute_what_we_compute(workspace: Workspace, name: str, lora: dict[str, Any]) -> None:
    base = base_model(workspace, name)
    checkpoint = trained(workspace, base, lora) / "checkpoints" / "step-00000012"
    ours = orchestrator.logits(checkpoint, TOKENS, device="cpu")

    out = export(workspace, "--experiment=tuned", "--format=adapter").succeeded().out
    assert f"base       {base}" in out
    folder = workspace.root / "tuned-adapter"
    assert not {"optimizer.safetensors", "trainer_state.json", "config.json"} & {file.name for file in folder.iterdir()}
    alone = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(logits(alone), ours, atol=1e-4)
    assert (
        AutoTokenizer.from_pretrained(folder)("Hello").input_ids
        == AutoTokenizer.from_pretrained(base)("Hello").input_ids
    )

    export(workspace, "--experiment=tuned", "--format=hf", "--merge").succeeded()
    merged_model = load(workspace.root / "tuned-hf", "auto")
    assert merged_model.dtype == torch.float32
    np.testing.assert_allclose(logits(merged_model), ours, atol=1e-4)
    theirs = PeftModel.from_pretrained(load(base), folder).merge_and_unload()
    assert merged_model.state_dict().keys() == theirs.state_dict().keys()
    for key, value in merged_model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=0, atol=1e-6, msg=key)
    assert np.abs(logits(load(base)) - ours).max() > 1e-2, "the adapters do something"


def test_a_merged_weight_is_rounded_once(workspace: Workspace) -> None:
    base = base_model(workspace, "qwen_3", torch.bfloat16)
    checkpoint = trained(workspace, base, {"rank": 4, "alpha": 8}, "bf16") / "checkpoints" / "step-00000012"
    export(workspace, "--experiment=tuned", "--format=hf", "--merge", "--max-shard-size=60KB").succeeded()
    folder = workspace.root / "tuned-hf"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    merged_weights, before = load(folder, "auto").state_dict(), load(base, "auto").state_dict()
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    for key, value in before.items():
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in adapters:
            assert torch.equal(merged_weights[key], value), key
            continue
        down, up = (adapters[f"{prefix}.lora_{part}.weight"].double() for part in "AB")
        exact = value.double() + 2.0 * up @ down
        assert merged_weights[key].dtype == torch.bfloat16
        assert not torch.equal(merged_weights[key], value), key
        # Twice-rounded weights are up to a whole unit of the last place away; f32's own rounding decides near ties.
        unit = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
        assert ((merged_weights[key].double() - exact).abs() <= 0.5001 * unit).all(), key


def test_llama_cpp_computes_the_merged_model(workspace: Workspace) -> None:
    base = base_model(workspace, "llama_3")
    checkpoint = trained(workspace, base, {"rank": 4, "alpha": 16}) / "checkpoints" / "step-00000012"
    file = workspace.root / "merged.gguf"
    export(workspace, "--checkpoint", checkpoint, "--merge", "--type=f32", "--out", file).succeeded()
    expected, base_loss = our_loss(checkpoint, TOKENS[:24]), our_loss(base, TOKENS[:24])
    with llama_cpp(file) as server:
        loss = server.loss(TOKENS[:24], SIZES["vocab_size"])
    assert loss == pytest.approx(expected, abs=1e-5)
    assert abs(loss - base_loss) > 1e-3


def test_adapters_of_peft_are_merged_and_listed(workspace: Workspace) -> None:
    base = base_model(workspace, "llama_2")
    torch.manual_seed(3)
    settings = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = get_peft_model(load(base), settings)
    theirs.peft_config["default"].base_model_name_or_path = str(base)
    folder = workspace.root / "theirs" / "checkpoint-7"
    theirs.save_pretrained(folder)
    listing = export(workspace, "--checkpoint=theirs", "--list").succeeded().out
    assert "checkpoint-7" in listing and " 3 " in listing and "base" in listing
    export(workspace, "--checkpoint", folder, "--format=hf", "--merge", "--out=merged").succeeded()
    expected = logits(theirs.merge_and_unload())
    np.testing.assert_allclose(logits(load(workspace.root / "merged")), expected, atol=1e-5)


def test_training_goes_on_from_what_was_exported(workspace: Workspace) -> None:
    base = base_model(workspace, "llama_2")
    trained(workspace, base, {"rank": 4, "alpha": 8})
    export(workspace, "--experiment=tuned", "--format=adapter").succeeded()
    second = trained(workspace, base, {"init_from": str(workspace.root / "tuned-adapter")}, name="second")
    last, first = (workspace.metrics(name, "evaluation") for name in ("tuned", "second"))
    assert first[0]["loss"] == pytest.approx(last[-1]["loss"], abs=1e-6)
    assert PeftConfig.from_pretrained(second / "checkpoints" / "step-00000012").lora_alpha == 8


def test_pushed_adapters_name_their_model_s_repository(tmp_path: Path) -> None:
    """A model of the Hub is fine-tuned, and its adapters are loaded from the Hub by their name alone."""
    root = tmp_path / "hub"
    model = make_model("smollm_2", root / "models" / "owner" / "small")
    write_tokenizer("smollm_2", TEXTS, model)
    (tmp_path / "work").mkdir()
    with FakeHub(root, token="hf_abcdefghijklmnopqrstuvwxyz01234567") as hub:
        workspace = Workspace(tmp_path / "work", hub.environment(tmp_path / "hf"))
        rows = workspace.root / "chats.jsonl"
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
        rows.write_text(json.dumps({"messages": turns}) + "\n" + 40 * (json.dumps({"messages": turns}) + "\n"))
        tune = (
            "finetune --model owner/small --lora-rank 4 --chat-template chatml --steps 4 --seq-len 64 --batch-size 2 "
            "--grad-accum 1 --device cpu --experiment chat"
        )
        workspace.orchestrate(*tune.split(), "--input", rows).succeeded()
        push = [workspace.python, "-m", "orchestrator", "push", "alice/mine", "--experiment=chat"]
        out = workspace.command(*push).succeeded().out
        assert "tag        step-00000004" in out
        adapter_config = json.loads((root / "models/alice/mine/adapter_config.json").read_text())
        assert adapter_config["base_model_name_or_path"] == "owner/small"
        assert len(adapter_config["revision"]) == 40
        card = ModelCard.load(root / "models/alice/mine/README.md")
        assert (card.data["base_model"], card.data["library_name"]) == ("owner/small", "peft")
        assert "fine-tuned on conversations beside the weights of [owner/small]" in card.text
        (example,) = [part.split("```")[0] for part in card.text.split("```python\n")[1:]]
        loaded = workspace.command(workspace.python, "-c", example).succeeded()
        assert "Hello!" in loaded.out
        workspace.command(*push[:4], "alice/whole", "--experiment=chat", "--merge").succeeded()
        assert {"config.json", "model.safetensors"} <= {file.name for file in (root / "models/alice/whole").iterdir()}

        export(workspace, "--experiment=chat", "--format=adapter", "--out=local").succeeded()
        config = workspace.root / "local" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(model)}))
        only_here = [*push[:4], "alice/local", "--checkpoint=local"]
        workspace.command(*only_here).refused(2, "which nobody else has: --base-model OWNER/NAME")
        assert not (root / "models/alice/local").exists()
        workspace.command(*only_here, "--base-model=owner/small").succeeded()
