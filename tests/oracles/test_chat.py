"""`orchestrate chat` writes what transformers writes for the same conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_tokenizers
import torch
from fake_hub.fineweb import documents
from tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Workspace

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = ["What is 3?", "And <|im_end|> twice?\u4e2d", "caf\u00e9"]
SYSTEM = "Answer briefly."


@pytest.fixture
def model(workspace: Workspace) -> Path:
    """A model that has learnt to end its turns."""
    folder = workspace.root / "model"
    tokenizer = tiny_tokenizers.train("qwen_2", list(documents())[:50], 384)
    tiny_tokenizers.write(tokenizer, "qwen_2", folder, eos_token="<|im_end|>")
    make_model("llama_2", folder, vocab_size=tokenizer.get_vocab_size())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = workspace.root / "rows.jsonl"
    turns = [
        [
            ("user", f"What is {index}?"),
            ("assistant", f"It is {index}."),
            ("user", "Twice?"),
            ("assistant", f"{2 * index}"),
        ]
        for index in range(64)
    ]
    lines = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in turns]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = "--steps 60 --seq-len 64 --batch-size 4 --grad-accum 1 --learning-rate 5e-3 --device cpu --experiment chat"
    workspace.orchestrate(
        "finetune", "--model", folder, "--input", rows, *flags.split(), "--precision=fp32"
    ).succeeded()
    return workspace.run_folder("chat") / "checkpoints" / "step-00000060"


def expected(folder: Path, turns: list[str]) -> list[str]:
    """Return the greedy answers of transformers, each to the conversation so far."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")}

    def text(content: str) -> list[int]:
        """Return ids in which no text is a special token, as ours are."""
        return tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)

    answers: list[str] = []
    messages = [("system", SYSTEM)]
    for turn in turns:
        messages.append(("user", turn))
        ids: list[int] = []
        for role, content in messages:
            ids += [special["<|im_start|>"], *text(f"{role}\n{content}"), special["<|im_end|>"], *text("\n")]
        ids += [special["<|im_start|>"], *text("assistant\n")]
        stops = [special["<|im_end|>"], tokenizer.convert_tokens_to_ids("<|endoftext|>")]
        generated_ids = model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=stops, pad_token_id=0,
        )[0, len(ids) :].tolist()  # fmt: skip
        answers.append(tokenizer.decode(generated_ids, skip_special_tokens=True))
        messages.append(("assistant", answers[-1]))
    return answers


def test_greedy_answers_are_those_of_transformers(workspace: Workspace, model: Path) -> None:
    chat = ["chat", "chat", "--temperature=0", "--max-tokens=24", f"--system={SYSTEM}", "--device=cpu"]
    answers = expected(model, TURNS)
    assert all(answers)
    single_answer = workspace.orchestrate(*chat, f"--once={TURNS[0]}").succeeded()
    assert single_answer.out == answers[0] + "\n"
    input_file = workspace.root / "typed.txt"
    input_file.write_text("".join(f"{turn}\n" for turn in TURNS) + "\n/reset\n" + TURNS[0] + "\n/exit\nnever asked\n")
    script = workspace.command(
        "sh", "-c", f"orchestrate {' '.join(chat[:4])} '{chat[4]}' {chat[5]} < {input_file}"
    ).succeeded()
    assert script.out == "".join(f"{answer}\n" for answer in [*answers, answers[0]])
