"""What `orchestrate finetune` says: which models it takes, what a template lacks, and the way out by what was typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_finetune import SMALL, TEMPLATE, finetune, pretrained, write_rows
from workspace import Finished, Workspace

__all__ = ["pretrained"]


@pytest.fixture
def rows(workspace: Workspace) -> Path:
    return write_rows(workspace.root / "rows.jsonl")


def copied(workspace: Workspace, pretrained: Path, name: str, **files: str | None) -> Path:
    """Return a copy of the model with other files; None removes one."""
    folder = Path(shutil.copytree(pretrained, workspace.root / name))
    for file, content in files.items():
        path = folder / file.replace("__", ".")
        path.unlink() if content is None else path.write_text(content)
    return folder


def tuned(workspace: Workspace, model: Path | str, rows: Path, name: str, *arguments: str) -> Finished:
    flags = [f"--experiment={name}", "--steps=1", "--input", str(rows), *SMALL, *arguments]
    return workspace.orchestrate("finetune", "--model", str(model), *flags)


def test_a_run_is_named_by_its_newest_checkpoint(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    tuned(workspace, pretrained, rows, "first").succeeded()
    newest = f"runs/first/checkpoints/{workspace.checkpoints('first')[-1]}"
    names: list[Path | str] = ["first", workspace.run_folder("first")]
    for number, name in enumerate(names):
        output = tuned(workspace, name, rows, f"again-{number}").succeeded().out
        assert "is a run: training starts from its newest checkpoint" in output and newest in output
    tuned(workspace, pretrained, rows, "adapters", "--lora-rank=2").succeeded()
    way = ("--model adapters: its newest checkpoint holds LoRA adapters", "--lora-init-from adapters", "--merge")
    tuned(workspace, "adapters", rows, "x").refused(2, *way)
    go_on = ["--experiment=more", "--steps=1", "--input", str(rows), *SMALL, "--lora-init-from", "adapters"]
    process = workspace.orchestrate("finetune", *go_on).succeeded()
    assert "adapters start from those in" in process.out + process.err


def test_more_epochs_continue_a_run_that_ended(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    flags = ["--model", str(pretrained), "--input", str(rows), "--experiment=ended", *SMALL, "--epochs=1"]
    workspace.orchestrate("finetune", *flags).succeeded()
    steps = len(workspace.metrics("ended"))
    resume = ["finetune", "--experiment=ended", "--resume"]
    process = workspace.orchestrate(*resume).succeeded()
    assert f"nothing is left to train: the run is at step {steps}, and the training text has ended" in process.out
    workspace.orchestrate(*resume, "--epochs=2").succeeded()
    assert len(workspace.metrics("ended")) == 2 * steps
    workspace.orchestrate(*resume, "--model=x").refused(2, "leave out --model")


def test_files_and_empty_folders_name_the_way(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    (workspace.root / "model.gguf").write_bytes(b"GGUF")
    (workspace.root / "empty").mkdir()
    for model, words in {
        "model.gguf": ("--model model.gguf is a GGUF file, which llama.cpp runs", "gguf_file=NAME", "save_pretrained"),
        str(pretrained / "config.json"): ("is a file: name the folder of the model",),
        "empty": ("--model empty", "config.json: there is no such file", "name the folder"),
    }.items():
        process = tuned(workspace, model, rows, "x")
        process.refused(2, *words)
        assert "--init-from" not in process.err


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "--once=hi", "--checkpoint=model.gguf"], ["chat", "--once=hi", "model.gguf"],
        ["generate", "--prompt=hi", "--checkpoint=model.gguf"], ["evaluate", "--checkpoint=model.gguf"],
        ["export", "--format=hf", "--checkpoint=model.gguf"],
    ],
)  # fmt: skip
def test_a_gguf_file_is_told_what_it_is(workspace: Workspace, words: list[str]) -> None:
    (workspace.root / "model.gguf").write_bytes(b"GGUF")
    process = workspace.orchestrate(*words)
    process.refused(2, "model.gguf is a GGUF file, which llama.cpp runs", "name the folder of the model", "gguf_file=")


def test_what_a_row_loses_is_named_and_counted(workspace: Workspace, pretrained: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "A river."}]
    tools = [{"type": "function", "function": {"name": "find"}}]
    rows_with_extras = [{"messages": messages, "tools": tools, "documents": [{"text": "x"}], "source": "web"}] * 40
    bad: list[dict[str, Any]] = [
        {"messages": [{"role": "bot", "content": "x"}, messages[1]]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, messages[1]]},
        {"messages": [messages[0], {**messages[1], "weight": 0.5}]},
    ]
    rows = write_rows(workspace.root / "rows.jsonl", [*bad, *rows_with_extras, *[{"messages": messages}] * 40])
    process = tuned(workspace, pretrained, rows, "lost", f"--override=data.validation_shards=[{rows}]").succeeded()
    assert "a row has `tools`, which the chat template does not use" in process.err
    assert "a row has `documents`, which is not used" in process.err and "source" not in process.err
    assert "conversations with fields that are not used: 40" in process.out
    reasons = ("1 with a message of no known role", "1 with a message that is not text", "1 with an invalid weight")
    assert "rows skipped: " + ", ".join(reasons) in process.out
    data = workspace.metrics("lost", "data")[-1]
    assert [data[name] for name in ("skipped_rows", "unknown_role", "not_text", "invalid_weight")] == [3, 1, 1, 1]


def test_dropout_that_is_left_out_is_noted(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    config = json.loads((pretrained / "config.json").read_text())
    model = copied(workspace, pretrained, "dropout", config__json=json.dumps({**config, "attention_dropout": 0.1}))
    process = tuned(workspace, model, rows, "dropout").succeeded()
    assert "attention_dropout 0.1, which transformers applies in training" in " ".join(process.out.split())
    assert "attention_dropout" not in tuned(workspace, pretrained, rows, "plain").succeeded().out


def test_texts_are_trained_on_by_an_override(workspace: Workspace, pretrained: Path) -> None:
    texts = write_rows(workspace.root / "texts.jsonl", [{"text": f"text <|endoftext|> {index}"} for index in range(96)])
    finetune(workspace, pretrained, "--input", texts, "--steps=1").refused(3, "data.format: text")
    shutil.rmtree(workspace.run_folder("chat"))
    as_text: list[str | Path] = ["--input", texts, "--steps=1", "--override=data.format=text"]
    process = finetune(workspace, pretrained, *as_text).succeeded()
    assert "spells the special token <|endoftext|>, which becomes that token" in process.err
    assert "rows that spell special tokens: " in process.out
    assert json.loads((workspace.run_folder("chat") / "resolved_config.json").read_text())["data"][
        "parse_special_tokens"
    ]


def test_defaults_are_not_said_to_be_typed(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    process = tuned(workspace, pretrained, rows, "x", "--override=data.sequence_length=1000000")
    process.refused(2, "data.sequence_length", "given by --override")
    process = tuned(workspace, pretrained, rows, "x", "--override=data.format=text", "--override=data.packing=padded")
    assert "data.chat_template_date" not in process.err


def test_a_template_without_an_end_of_turn_is_told(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    endless = TEMPLATE.replace("<|endoftext|>", "")
    model = copied(workspace, pretrained, "endless", chat_template__jinja=endless)
    assert "does not learn to stop" in tuned(workspace, model, rows, "endless-run").succeeded().out
    process = workspace.orchestrate("chat", "endless-run", "--once=Hi", "--max-tokens=2", "--device=cpu").succeeded()
    assert "no token that ends a turn" in process.err
    assert "learn to stop" not in tuned(workspace, pretrained, rows, "usual").succeeded().out


def test_rows_that_the_template_refuses_are_not_held_out(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    strict = "{% if messages|length > 4 or messages[0].content != 'How many?' %}{{ raise_exception('no') }}{% endif %}"
    model = copied(workspace, pretrained, "strict", chat_template__jinja=strict + TEMPLATE)
    process = tuned(workspace, model, rows, "x")
    process.refused(3, "refused by the chat template", "--chat-template")
    assert "held_out_fraction" not in process.err


def test_chat_without_a_template_names_its_own_flag(workspace: Workspace, pretrained: Path) -> None:
    model = copied(workspace, pretrained, "bare", chat_template__jinja=None)
    process = workspace.orchestrate("chat", "--checkpoint", model, "--once=hi", "--device=cpu")
    process.refused(2, "has no chat template", "--chat-template")
    assert "data.chat_template" not in process.err


def test_added_tokens_beyond_the_vocabulary_are_named(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    model = copied(workspace, pretrained, "padded")
    tokenizer: dict[str, Any] = json.loads((model / "tokenizer.json").read_text())
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": size, "content": "[PAD]"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    process = tuned(workspace, model, rows, "x")
    process.refused(2, "[PAD]", f"resize_token_embeddings({size + 1})")
    assert "another model" not in process.err


def test_generate_takes_special_tokens_on_request(workspace: Workspace, pretrained: Path) -> None:
    arguments: list[str | Path] = [
        "generate",
        "--checkpoint",
        pretrained,
        "--prompt=a <|endoftext|>",
        "--max-tokens=1",
        "--device=cpu",
    ]
    assert "--special reads it as that token" in workspace.orchestrate(*arguments).succeeded().err
    assert "special" not in workspace.orchestrate(*arguments, "--special").succeeded().err


def test_adapters_bring_their_chat_template(workspace: Workspace, pretrained: Path, rows: Path) -> None:
    own = workspace.root / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}\n")
    flags: list[str | Path] = ["--steps=1", "--input", rows, *SMALL]
    tuned(workspace, pretrained, rows, "usual", "--lora-rank=2").succeeded()
    tuned(workspace, pretrained, rows, "other", "--lora-rank=2", f"--chat-template={own}").succeeded()
    for start, is_told in (("usual", False), ("other", True)):
        folder = workspace.run_folder(start)
        words: list[str | Path] = ["finetune", "--lora-init-from", folder, f"--experiment={start}-on", *flags]
        output = workspace.orchestrate(*words).succeeded().out
        assert ("the chat template is that of the adapters" in output) == is_told
        template = Path("checkpoints/step-00000001/chat_template.jinja")
        assert (workspace.run_folder(f"{start}-on") / template).read_text() == (folder / template).read_text()
