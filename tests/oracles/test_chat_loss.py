"""The loss on conversations is that of transformers with the label -100 for what the assistant does not say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_tokenizers
import torch
from fake_hub.fineweb import documents
from tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from workspace import Workspace

ROWS = 16
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = """
model: {{init_from: {model}}}
data: {{format: chat, train_shards: [{rows}], validation_shards: [{rows}], sequence_length: 96, batch_size: 4,
       packing: {packing}, gradient_accumulation_steps: {accumulation}}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
scheduler: {{strategy: constant, warmup_steps: 0, total_epochs: 1}}
runtime: {{device: cpu, precision: fp32, checkpoint: {{every_n_steps: 1}}, evaluation: {{every_n_steps: null}}}}
"""


def conversation(index: int) -> list[dict[str, str]]:
    turns = [("user", f"What is {index}?"), ("assistant", f"It is <|im_end|> {index}.")]
    turns += [("user", "Twice?"), ("assistant", str(2 * index))] if index % 2 else []
    return [{"role": role, "content": content} for role, content in turns]


def expected_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[float, int]:
    """Return the mean loss over what the assistant says in all rows, and the number of its tokens."""
    total, count = 0.0, 0
    for index in range(ROWS):
        ids, labels = [], []
        for message in conversation(index):
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
            tail = tokenizer.encode("<|im_end|>", add_special_tokens=False)
            text = tokenizer.encode(message["content"], add_special_tokens=False, split_special_tokens=True)
            ids += head + text + tail
            content_labels = text + tail if message["role"] == "assistant" else [-100] * len(text + tail)
            labels += [-100] * len(head) + content_labels
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels)
    return total / count, count


@pytest.mark.parametrize("packing", ["padded", "documents"])
def test_only_what_the_assistant_says_is_in_the_loss(packing: str, workspace: Workspace) -> None:
    folder = workspace.root / "model"
    tokenizer_json = tiny_tokenizers.write(
        tiny_tokenizers.train("qwen_2", list(documents())[:50], 384), "qwen_2", folder, eos_token="<|im_end|>"
    )
    make_model("llama_2", folder, vocab_size=AutoTokenizer.from_pretrained(folder).vocab_size)
    (tokenizer_json.parent / "chat_template.jinja").write_text(MARKED)
    rows = workspace.root / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": conversation(index)}) + "\n" for index in range(ROWS)))
    loss, tokens = expected_loss(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    config = workspace.root / "run" / "training.yaml"
    config.parent.mkdir()
    # All rows are one step: the loss of its mean is that of all their tokens.
    accumulation = {"padded": ROWS // 4, "documents": 4}[packing]
    config.write_text(CONFIG.format(model=folder, rows=rows, packing=packing, accumulation=accumulation))
    workspace.trainer("train", f"--config={config}").succeeded()
    lines = (config.parent / "metrics.jsonl").read_text().splitlines()
    first: dict[str, Any] = next(row for row in map(json.loads, lines) if row["kind"] == "train")
    assert first["tokens"] == tokens
    assert first["loss"] == pytest.approx(loss, abs=1e-5)
