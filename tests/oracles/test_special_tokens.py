"""Special tokens as transformers reads them from every file of a tokenizer's folder."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from orchestrator import _native
from tiny_models import make_model
from transformers import AutoTokenizer

IGNORED = -100
VOCABULARY = 384
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}" + CHATML
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "A river."}]
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
PROPERTIES = ("lstrip", "normalized", "rstrip", "single_word", "special")
CONFIG = """
model: {hidden_size: 8, intermediate_size: 8, num_layers: 1, num_attention_heads: 1, max_position_embeddings: 512}
data: {format: chat, packing: padded, sequence_length: 512, batch_size: 1, sequences_per_step: 1, bos: false,
  assistant_only_loss: false}
scheduler: {strategy: constant, total_epochs: 1, warmup_steps: 0}
runtime: {device: cpu}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has room for tokens that its tokenizer.json lacks."""
    folder = make_model("smollm_2", tmp_path_factory.mktemp("special") / "model", vocab_size=VOCABULARY)
    tokenizer = tiny_tokenizers.train("smollm_2", list(documents())[:30], 320)
    tiny_tokenizers.write(tokenizer, "smollm_2", folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][1:] = []  # <|im_start|> and <|im_end|> stay in the vocabulary, as ordinary tokens
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def drawn_files(folder: Path, chance: random.Random) -> None:
    """Write files that name tokens of the vocabulary and others, with and without ids and properties.

    With an `added_tokens.json` roles are texts: transformers does not see that it has an object's token.
    """
    has_added_tokens = chance.random() < 0.4
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<a>", "<b>", "<c>", "the"]

    def properties() -> dict[str, bool]:
        return {key: chance.random() < 0.5 for key in PROPERTIES}

    def role() -> Any:
        name = chance.choice(names)
        kind = {"__type": "AddedToken", "content": name, **properties()}
        return name if has_added_tokens else chance.choice([name, kind])

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "image_token"):
        if chance.random() < 0.4:
            config[key] = role()
    if chance.random() < 0.4:
        config[chance.choice(["additional_special_tokens", "extra_special_tokens"])] = chance.sample(names, 2)
    if chance.random() < 0.4:
        chosen_names = chance.sample(names, 3)
        ids = chance.sample(range(320, 340), 3)
        config["added_tokens_decoder"] = {
            str(index): {"content": name, **properties()} for index, name in zip(ids, chosen_names, strict=True)
        }
    if has_added_tokens:
        write(folder, "added_tokens.json", {name: 320 + index for index, name in enumerate(chance.sample(names, 3))})
    if chance.random() < 0.5:
        roles = {key: chance.choice(names) for key in ("bos_token", "eos_token", "cls_token") if chance.random() < 0.5}
        roles |= {"pad_token": {"content": chance.choice(names), **properties()}} if chance.random() < 0.5 else {}
        write(folder, "special_tokens_map.json", {key: plain(value) for key, value in roles.items()})
    write(folder, "tokenizer_config.json", config)


def plain(token: Any) -> Any:
    return {key: value for key, value in token.items() if key != "special"} if isinstance(token, dict) else token


def test_added_tokens_and_roles_equal_transformers(model: Path, tmp_path: Path) -> None:
    for seed in range(60):
        folder = tmp_path / str(seed)
        shutil.copytree(model, folder)
        drawn_files(folder, random.Random(seed))
        theirs = AutoTokenizer.from_pretrained(folder)
        ours = _native.model_tokens(folder)
        expected = json.loads(theirs.backend_tokenizer.to_str())["added_tokens"]
        assert ours["tokenizer_json"]["added_tokens"] == expected, seed
        assert ours["roles"] == theirs.special_tokens_map, seed


def trained_ids(folder: Path, row: dict[str, Any]) -> list[int]:
    """Return the ids of a conversation as training reads it, up to the last that counts."""
    run = folder / "run"
    run.mkdir()
    rows = run / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    (run / "training.yaml").write_text(CONFIG)
    overrides = [
        f"data.train_shards=[{rows}]",
        f"data.validation_shards=[{rows}]",
        f"tokenizer.tokenizer_json={folder / 'tokenizer.json'}",
    ]
    config = orchestrator.RunConfig.load(run / "training.yaml", overrides)
    inputs, targets = next(iter(orchestrator.TokenStream(config)))
    last = int(np.flatnonzero(targets[0] != IGNORED)[-1])
    return [*inputs[0][: last + 1].tolist(), int(targets[0][last])]


@pytest.mark.parametrize("file", ["added_tokens_decoder", "added_tokens.json", "extra_special_tokens"])
def test_tokens_of_other_files_are_trained_as_tokens(model: Path, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    config: dict[str, Any] = {"eos_token": "<|turn_end|>", "chat_template": CHATML.replace("im_end", "turn_end")}
    if file == "added_tokens.json":
        write(folder, file, {"<|turn_end|>": 320})
    elif file == "added_tokens_decoder":
        config[file] = {"320": {"content": "<|turn_end|>", **FLAGS}}
    else:
        config[file] = ["<|turn_end|>"]
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(SAID, return_dict=False)
    assert 320 in theirs
    assert trained_ids(folder, {"messages": SAID}) == theirs


@pytest.mark.parametrize("place", ["list", "files"])
def test_rows_with_tools_take_the_template_of_tools(model: Path, tmp_path: Path, place: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if place == "list":
        templates = {"tool_use": WITH_TOOLS, "default": CHATML}
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    else:
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    write(folder, "tokenizer_config.json", config)
    theirs = AutoTokenizer.from_pretrained(folder)
    for name, tools in (("tools", [TOOL]), ("none", None)):
        expected = theirs.apply_chat_template(SAID, tools=tools, return_dict=False)
        row = {"messages": SAID, "tools": tools} if tools else {"messages": SAID}
        own = shutil.copytree(folder, tmp_path / name)
        assert trained_ids(own, row) == expected
