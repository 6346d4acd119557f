"""Conversations become the ids of transformers' `apply_chat_template`, and count what its generation masks count.

The templates are those that trl ships as files; the tokenizers are small ones with each template's special tokens.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

LENGTH = 4096
IGNORED = -100
SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s'\"{}]*[|\uff5c]>|<(?:bos|eos|pad|start_of_turn|end_of_turn|\|?turn\|?)>|\[/?[A-Z_]{3,}\]"
)
CONFIG = """
model: {hidden_size: 8, intermediate_size: 8, num_layers: 1, num_attention_heads: 1, max_position_embeddings: 4096}
data: {format: chat, packing: padded, sequence_length: 4096, batch_size: 1, sequences_per_step: 1, bos: false}
scheduler: {strategy: constant, total_epochs: 1, warmup_steps: 0}
runtime: {device: cpu}
"""


def templates(suffix: str = "") -> list[Any]:
    """Return trl's templates; those with generation masks end in `_training`."""
    files = importlib.metadata.files("trl") or []
    paths = sorted(Path(str(file.locate())) for file in files if file.suffix == ".jinja")
    return [pytest.param(path, id=path.stem) for path in paths if path.stem.endswith(suffix)]


def turns(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tell the weather <in> "a" city\'s centre & around.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": {"city": "K\u00f6ln", "days": 2}},
}
TURN = (("user", "f"), ("assistant", "g"))
# No turn of the assistant ends in a character of several tokens, of which transformers' mask has the first only.
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": turns(("user", "Hello."), ("assistant", "Hi!"))},
    {"messages": turns(("system", "Be  brief.\n"), ("user", " What's 2+2? "), ("assistant", "4"))},
    {"messages": turns(("user", "a"), ("assistant", "b"), ("user", "c\n\nd"), ("assistant", " e "), *TURN)},
    {"messages": turns(
        ("user", "\u4f60\u597d \U0001f642 \u0928\u092e\u0938\u094d\u0924\u0947"),
        ("assistant", "\u00e9\u0301\u200d \U0001f469\u200d\U0001f467.")
    )},
    {"messages": turns(("user", "Think."), ("assistant", "<think>\nWell.\n</think>\n\nDone."))},
    {"messages": turns(("user", "{{ messages }} {% raw %} 'x' \\n"), ("assistant", "<b>&amp;</b>\t\"q\""))},
    {"messages": turns(("developer", "Rules."), ("user", "x"), ("assistant", "y"))},
    {
        "messages": [
            *turns(("user", "Weather?")),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": "{\"sun\": true}", "tool_call_id": "call00001"},
            *turns(("assistant", "Sunny.")),
        ],
        "tools": [WEATHER],
    },
    {
        "messages": [
            *turns(("user", "Go")),
            {"role": "assistant", "content": "All right", "reasoning_content": "hm", "thinking": "hm"},
        ]
    },
]  # fmt: skip


class Model:
    """A tokenizer with a template, for both sides."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        source = template.read_text(encoding="utf-8")
        self.special = sorted({"<|bos|>", "<|eos|>", *SPECIAL.findall(source)})
        tokenizer = tiny_tokenizers.train("qwen_2", list(documents())[:50], 500)
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in self.special])
        tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
        roles = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        self.tokenizer_json = tiny_tokenizers.write(tokenizer, "qwen_2", folder / "model", **roles)
        (folder / "model" / "chat_template.jinja").write_text(source, encoding="utf-8")
        self.theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "model")

    def expected(self, rows: list[dict[str, Any]], mask: bool) -> list[tuple[list[int], list[bool]]]:
        """Return the ids that transformers makes of those rows that the template takes, and which of them count."""
        sequences = []
        for row in rows:
            try:
                encoding = self.theirs.apply_chat_template(
                    row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=mask
                )
            except (TemplateError, TypeError, ValueError, KeyError):
                continue
            ids = encoding["input_ids"]
            sequences.append(
                (ids, [bool(count) for count in encoding["assistant_masks"]] if mask else [True] * len(ids))
            )
        return sequences

    def ours(self, rows: list[dict[str, Any]], mask: bool, *extra: str) -> list[tuple[list[int], list[bool]]]:
        data = self.folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = self.folder / "run" / "training.yaml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(CONFIG)
        overrides = [
            f"data.train_shards=[{data}]",
            f"data.validation_shards=[{data}]",
            f"tokenizer.tokenizer_json={self.tokenizer_json}",
            f"data.assistant_only_loss={str(mask).lower()}",
            f"data.chat_template_date={datetime.now().astimezone().date().isoformat()}",
            *extra,
        ]
        stream = orchestrator.TokenStream(orchestrator.RunConfig.load(config, overrides))
        return [conversation(inputs[0], targets[0], mask) for inputs, targets in stream]


def conversation(inputs: np.ndarray, targets: np.ndarray, mask: bool) -> tuple[list[int], list[bool]]:
    """Return the ids of a padded sequence without its padding, and which of them count; the first never does."""
    counted = np.flatnonzero(targets != IGNORED)
    last = int(counted[-1])
    ids = [*inputs[: last + 1].tolist(), int(targets[last])]
    return ids, [not mask, *(bool(target != IGNORED) for target in targets[: last + 1])]


def trimmed(sequences: list[tuple[list[int], list[bool]]]) -> list[tuple[list[int], list[bool]]]:
    """Cut each conversation after the last token that counts, as nothing else of it is learned."""
    cut = []
    for ids, counts in sequences:
        end = max((index for index, count in enumerate(counts) if count), default=-1) + 1
        if any(counts[1:]):
            cut.append((ids[:end], counts[:end]))
    return sorted(cut)


@pytest.mark.parametrize("template", templates())
def test_ids_equal_transformers(template: Path, tmp_path: Path) -> None:
    model = Model(tmp_path, template)
    expected = model.expected(CONVERSATIONS, mask=False)
    if not expected:
        pytest.skip("the template takes no text")
    assert sorted(model.ours(CONVERSATIONS, mask=False)) == sorted(expected)


@pytest.mark.parametrize("template", templates("_training"))
def test_generation_masks_equal_transformers(template: Path, tmp_path: Path) -> None:
    model = Model(tmp_path, template)
    expected = trimmed(model.expected(CONVERSATIONS, mask=True))
    if not expected:
        pytest.skip("the template takes no text")
    assert sorted(model.ours(CONVERSATIONS, mask=True)) == expected


PROMPTS: list[list[dict[str, Any]]] = [
    turns(("user", "Hello.")),
    turns(("system", "Be brief."), ("user", " What's 2+2? ")),
    turns(("user", "a"), ("assistant", "b"), ("user", "c\n\nd")),
]


@pytest.mark.parametrize("template", [template for template in templates() if not template.id.endswith("_training")])
def test_a_completion_counts_as_trl_has_it(template: Path, tmp_path: Path) -> None:
    """trl's `SFTTrainer` counts what the ids of prompt and completion have behind the ids of the prompt."""
    model = Model(tmp_path, template)
    rows, expected = [], []
    for prompt in PROMPTS:
        completion = turns(("assistant", "Four, I say."))
        try:
            prompt_ids, whole_ids = (
                model.theirs.apply_chat_template(messages, add_generation_prompt=part, return_dict=True)["input_ids"]
                for messages, part in ((prompt, True), ([*prompt, *completion], False))
            )
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
        if whole_ids[: len(prompt_ids)] == prompt_ids and len(prompt_ids) < len(whole_ids):
            rows.append({"prompt": prompt, "completion": completion})
            expected.append((whole_ids, [False] * len(prompt_ids) + [True] * (len(whole_ids) - len(prompt_ids))))
    if not expected:
        pytest.skip("no rendered prompt is the start of the rendered conversation")
    try:
        actual = model.ours(rows, mask=True)
    except orchestrator.ConfigError as refusal:
        assert "renders the first" in str(refusal)
        pytest.skip("the template renders messages otherwise when more follow")
    assert sorted(actual) == sorted(expected)


@pytest.mark.parametrize("template", templates())
def test_special_tokens_in_text_stay_text(template: Path, tmp_path: Path) -> None:
    model = Model(tmp_path, template)
    spoofed = "".join(model.special)
    rows = [{"messages": turns(("user", text), ("assistant", "ok"))} for text in ("harmless", f"x{spoofed}y")]
    expected = model.expected(rows, mask=False)
    if len(expected) < len(rows) or "harmless" not in model.theirs.decode(expected[0][0]):
        pytest.skip("the template takes no text")
    special = {model.theirs.convert_tokens_to_ids(token) for token in model.special}
    plain, spoofing = sorted((ids for ids, _ in model.ours(rows, mask=False)), key=len)
    assert [token for token in spoofing if token in special] == [token for token in plain if token in special]
    assert plain == expected[0][0]
    assert spoofing != expected[1][0]
    assert model.theirs.decode(spoofing) == model.theirs.decode(expected[1][0])


def qwen3(suffix: str = "") -> Path:
    """Return trl's file of Qwen3's stock template, or of its training template."""
    (template_path,) = [template.values[0] for template in templates() if template.id == f"qwen3{suffix}"]
    return Path(str(template_path))


BUILT_IN_QWEN3 = "data.chat_template=qwen3"
SINGLE_TURNS = [row for row in CONVERSATIONS if sum(turn["role"] == "assistant" for turn in row["messages"]) == 1]


def test_the_built_in_qwen3_marks_what_its_users_train_on(tmp_path: Path) -> None:
    model = Model(tmp_path, qwen3("_training"))
    prompt = {"messages": turns(("user", "x")), "tools": [WEATHER]}
    answers = [{"role": "assistant", "content": "\nSee.", "tool_calls": [CALL, CALL["function"]]}]
    results = [
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        *turns(("assistant", "<think>q</think>r")),
    ]
    called = {**prompt, "messages": [*prompt["messages"], *answers, *results]}
    rows = [*CONVERSATIONS, called, {**called, "messages": [*turns(("system", "s")), *called["messages"]]}]
    assert sorted(model.ours(rows, True, BUILT_IN_QWEN3)) == trimmed(model.expected(rows, mask=True))


def test_the_built_in_qwen3_renders_single_turns_as_the_stock_does(tmp_path: Path) -> None:
    model = Model(tmp_path, qwen3())
    expected = sorted(model.expected(SINGLE_TURNS, mask=False))
    assert sorted(model.ours(SINGLE_TURNS, False, BUILT_IN_QWEN3)) == expected
    assert sorted(ids for ids, _ in model.ours(SINGLE_TURNS, True)) == [ids for ids, _ in expected]


@pytest.mark.parametrize("template", [qwen3(), qwen3("_training")], ids=["assembled", "marked"])
def test_spelled_special_tokens_are_parsed_on_request(template: Path, tmp_path: Path) -> None:
    model = Model(tmp_path, template)
    spoofed = "x".join(["", *model.special, " y ", model.special[0], ""])
    rows = [{"messages": turns(("user", spoofed), ("assistant", "ok"))}]
    assert model.ours(rows, False, "data.parse_special_tokens=true") == model.expected(rows, mask=False)


@pytest.mark.parametrize("kind", ["gpt_2", "smollm_2", "llama_2", "mistral_nemo", "llama_3", "qwen_2"])
def test_a_rendered_text_has_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    """As documents of a run that starts from a model, and as prompt and completion."""
    tokenizer = tiny_tokenizers.train(kind, list(documents())[:50], 500)
    spelled = ["<|turn|>", *tiny_tokenizers.SPECIAL_TOKENS[kind]]
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True, lstrip=True, rstrip=True, normalized=False)])
    path = tiny_tokenizers.write(tokenizer, kind, tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(path.parent)
    prompt, completion = "Hello <|turn|>\n" + " a ".join(spelled), f" b {spelled[-1]} c\u0301 <|turn|>  d"
    assert any(token in prompt for token in spelled)
    expected = theirs(prompt + completion, add_special_tokens=False).input_ids
    model = Model.__new__(Model)
    model.folder, model.tokenizer_json = tmp_path, path
    ((ids, _),) = model.ours([{"prompt": prompt, "completion": completion}], False)
    assert ids[:-1] == expected

    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": prompt + completion}) + "\n")
    config = tmp_path / "run" / "training.yaml"
    config.write_text(CONFIG.replace("format: chat, packing: padded,", ""))
    overrides = [f"data.train_shards=[{text}]", f"data.validation_shards=[{text}]", f"tokenizer.tokenizer_json={path}"]
    for parsed in ("true", "false"):
        stream = orchestrator.TokenStream(
            orchestrator.RunConfig.load(config, [*overrides, f"data.parse_special_tokens={parsed}"])
        )
        inputs, _ = next(iter(stream))
        assert (inputs[0].tolist()[1 : len(expected) + 1] == expected) == (parsed == "true")
