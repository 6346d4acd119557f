"""Where a model stops, how it pads and how it samples, through fine-tuning, merging and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from gguf import GGUFReader
from tiny_models import SIZES, make_model
from transformers import AutoTokenizer, GenerationConfig
from workspace import Finished, Workspace

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLING = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
STOPS = [2, 0, 7]
"""The end of a turn, the end of a text, and an ordinary token."""
PAD = 5
SMALL = ("--device=cpu", "--seq-len=64", "--steps=2", "--seed=7")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with three stop tokens, padding of its own and recommended sampling."""
    folder = make_model("smollm_2", tmp_path_factory.mktemp("settings") / "model")
    tokenizer = tiny_tokenizers.train("smollm_2", list(documents())[:60], SIZES["vocab_size"])
    roles = {"eos_token": "<|im_end|>", "pad_token": tokenizer.id_to_token(PAD), "chat_template": TEMPLATE}
    tiny_tokenizers.write(tokenizer, "smollm_2", folder, **roles)
    assert [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")] == STOPS[:2]
    GenerationConfig(bos_token_id=0, eos_token_id=STOPS, pad_token_id=PAD, **SAMPLING).save_pretrained(folder)
    return folder


def tuned(workspace: Workspace, model: Path, *flags: str) -> Path:
    """Fine-tune the model and return the checkpoint."""
    rows = workspace.root / "rows.jsonl"
    messages = [{"role": "user", "content": "Say a number."}, {"role": "assistant", "content": "One."}]
    rows.write_text((json.dumps({"messages": messages}) + "\n") * 64)
    words = ["finetune", "--model", model, "--input", rows, "--experiment=tuned", *SMALL, *flags]
    orchestrate(workspace, *words)
    return workspace.run_folder("tuned") / "checkpoints" / workspace.checkpoints("tuned")[-1]


def orchestrate(workspace: Workspace, *words: str | Path) -> Finished:
    return workspace.command(workspace.python, "-m", "orchestrator", *words).succeeded()


def check_folder(folder: Path, model: Path) -> None:
    """Check that transformers reads from a folder what it reads from the model."""
    ours, theirs = (GenerationConfig.from_pretrained(place) for place in (folder, model))
    for key in (*SAMPLING, "bos_token_id", "pad_token_id"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert sorted(ours.eos_token_id) == sorted(STOPS)
    actual, original = (AutoTokenizer.from_pretrained(place) for place in (folder, model))
    assert actual.special_tokens_map == original.special_tokens_map
    assert (actual.pad_token_id, actual.eos_token_id) == (PAD, STOPS[0])
    assert actual.chat_template == original.chat_template


def field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def check_gguf(file: Path) -> None:
    reader = GGUFReader(file)
    ends = [field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    assert (ends[0], sorted(ends)) == (STOPS[0], sorted(STOPS))
    assert field(reader, "tokenizer.ggml.padding_token_id") == PAD
    assert field(reader, "tokenizer.chat_template") == TEMPLATE
    for name, key in {
        "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }.items():  # fmt: skip
        assert field(reader, f"general.sampling.{name}") == pytest.approx(SAMPLING[key]), name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_generation_settings_survive_training_and_exports(workspace: Workspace, model: Path, lora: bool) -> None:
    flags, merge = (["--lora-rank=2"], ["--merge"]) if lora else ([], [])
    checkpoint = tuned(workspace, model, *flags)
    if not lora:
        check_folder(checkpoint, model)
    folder, file = workspace.root / "exported", workspace.root / "exported.gguf"
    orchestrate(workspace, "export", "--experiment=tuned", "--format=hf", "--out", folder, *merge)
    check_folder(folder, model)
    output = orchestrate(workspace, "export", "--experiment=tuned", "--format=gguf", "--out", file, *merge).out
    check_gguf(file)
    assert "GGUF has" not in output, "nothing is lost"


def test_what_gguf_cannot_hold_is_named(workspace: Workspace, model: Path) -> None:
    folder = workspace.root / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    for name, keys in {
        "generation_config.json": {
            "eos_token_id": [*STOPS, 8, 9], "no_repeat_ngram_size": 3, "typical_p": 1.0, "stop_strings": ["END"],
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True, "rstrip": True}},
            "extra_special_tokens": ["<|beyond|>"],
        },
    }.items():  # fmt: skip
        content = json.loads((folder / name).read_text())
        (folder / name).unlink()
        (folder / name).write_text(json.dumps({**content, **keys}))
    output = orchestrate(workspace, "export", "--checkpoint", folder, "--format=gguf", "--out=model.gguf").out
    message = " ".join(output.split())
    names = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens([8, 9])
    for words in (
        "GGUF has no key for no_repeat_ngram_size, stop_strings of generation_config.json",
        f"GGUF has keys for three tokens that end a text: llama.cpp may not stop at {', '.join(names)}",
        "GGUF has no rstrip: <|im_end|> takes white space after it here, not in llama.cpp",
        "the model has no embedding for <|beyond|>: the file leaves them out",
    ):
        assert words in message, message
