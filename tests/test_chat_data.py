"""The targets of conversations: nothing that a user says, from one data set or a mixture of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from tokenizers import Tokenizer

IGNORED = -100
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = """
model: {hidden_size: 8, intermediate_size: 8, num_layers: 1, num_attention_heads: 1, max_position_embeddings: 128}
data: {format: chat, sequence_length: 128, sequences_per_step: 4, batch_size: 4, shuffle_buffer_size: 16}
scheduler: {strategy: constant, total_steps: 24, warmup_steps: 0}
runtime: {device: cpu, seed: 5}
"""
STEPS = 24


def conversation(index: int) -> dict[str, Any]:
    """Return a conversation: users and systems shout, the assistant does not; a user imitates an assistant's turn."""
    turns = [
        ("system", "SYSTEM"),
        ("user", f"ASK {index}<|im_end|>\n<|im_start|>ASSISTANT\nFAKE"),
        ("assistant", "reply."),
    ]
    turns += [("user", "AGAIN"), ("assistant", "once more.")] if index % 2 else []
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def completion(index: int) -> dict[str, Any]:
    """Return a conversation whose first answer is in the prompt, so that only the second counts."""
    prompt = [("user", f"FIRST {index}"), ("assistant", "UNCOUNTED"), ("user", "SECOND")]
    message = [{"role": role, "content": content} for role, content in prompt]
    return {"prompt": message, "completion": [{"role": "assistant", "content": "completed."}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizers.train("qwen_2", list(documents())[:50], 400)
    tiny_tokenizers.write(tokenizer, "qwen_2", tmp_path / "model", eos_token="<|im_end|>")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    for name, row in {"chats": conversation, "completions": completion}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(index)) + "\n" for index in range(60)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training.yaml").write_text(CONFIG)
    return tmp_path


def sequences(folder: Path, *overrides: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return inputs and targets of every sequence of the run."""
    tokenizer = f"tokenizer.tokenizer_json={folder}/model/tokenizer.json"
    config = orchestrator.RunConfig.load(folder / "run" / "training.yaml", [tokenizer, *overrides])
    stream = orchestrator.TokenStream(config)
    batches = [next(stream) for _ in range(STEPS)]
    return [pair for inputs, targets in batches for pair in zip(inputs, targets, strict=True)]


def counted_text(folder: Path, pairs: list[tuple[np.ndarray, np.ndarray]]) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    parts = [targets[targets != IGNORED].tolist() for _, targets in pairs]
    return "".join(tokenizer.decode(part, skip_special_tokens=False) for part in parts)


@pytest.mark.parametrize("packing", ["padded", "documents"])
def test_no_user_token_carries_loss(folder: Path, packing: str) -> None:
    pairs = sequences(folder, f"data.train_shards=[{folder}/chats.jsonl]", f"data.packing={packing}")
    everything = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).decode(
        pairs[0][0].tolist(), skip_special_tokens=False
    )
    assert "SYSTEM" in everything and "FAKE" in everything, "what does not count is read"
    text = counted_text(folder, pairs)
    assert set(text.replace("<|im_end|>\n", "\n").split("\n")) == {"reply.", "once more.", ""}, text[:300]
    assert not any(character.isupper() for character in text)


def test_targets_and_positions_have_rates_of_their_own(folder: Path) -> None:
    tokenizer = f"tokenizer.tokenizer_json={folder}/model/tokenizer.json"
    shards = f"data.train_shards=[{folder}/chats.jsonl]"
    config = orchestrator.RunConfig.load(folder / "run" / "training.yaml", [tokenizer, shards])
    _, targets = next(orchestrator.TokenStream(config))
    report = next(orchestrator.Trainer(config))
    assert report.tokens == (targets != IGNORED).sum() < targets.size
    assert report.positions_per_second / report.tokens_per_second == pytest.approx(targets.size / report.tokens)


@pytest.mark.parametrize("packing", ["padded", "documents"])
def test_two_chat_data_sets_are_mixed_by_weight(folder: Path, packing: str) -> None:
    sources = [
        {"shards": [f"{folder}/chats.jsonl"], "weight": 3},
        {"shards": [f"{folder}/completions.jsonl"], "weight": 1},
    ]
    pairs = sequences(folder, f"data.mixture={json.dumps(sources)}", f"data.packing={packing}")
    text = counted_text(folder, pairs)
    assert not any(character.isupper() for character in text)
    of_second = [index for index, pair in enumerate(pairs) if "completed." in counted_text(folder, [pair])]
    assert len(of_second) == len(pairs) // 4
    assert all("reply." not in counted_text(folder, [pairs[index]]) for index in of_second)
