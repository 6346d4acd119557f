"""What people type from habit: flags of other programs, underscores, counts with units, `~`, data sets by address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from orchestrator import cli, habits
from orchestrator.options import schema_of

GROUP: Any = typer.main.get_command(cli.app)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
Captured = pytest.CaptureFixture[str]


def flags_of(command: Any) -> set[str]:
    return {name for option in command.params for name in [*option.opts, *option.secondary_opts]}


def refused(capfd: Captured, *words: str) -> str:
    """Return what `orchestrate` says of words that it refuses."""
    capfd.readouterr()
    assert cli._run(list(words)) == 2, words
    return capfd.readouterr().err


@pytest.mark.parametrize(
    "hints",
    [habits.TRAINING, habits.FINE_TUNING, habits.USING, habits.COMMANDS],
    ids=["training", "tuning", "using", "all"],
)
def test_every_hint_names_what_there_is(hints: dict[str, str]) -> None:
    known_flags = flags_of(GROUP).union(*map(flags_of, GROUP.commands.values()))
    for word, hint in hints.items():
        assert set(FLAG.findall(hint)) <= known_flags, word
        assert all(command in GROUP.commands for command in re.findall(r"orchestrate ([a-z][\w-]*)", hint)), word
        for key in re.findall(r"--override ([\w.]+)=", hint):
            schema_of(key)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--lr 1e-3", "--learning-rate"),
        ("--max_steps 5", "--steps"),
        ("--iters 5", "--steps"),
        ("--epochs 1", "--override scheduler.total_epochs"),
        ("--output_dir x", "--run-dir"),
        ("--name x", "--experiment"),
        ("--block_size 8", "--seq-len"),
        ("--context-length 8", "--seq-len"),
        ("--dtype bf16", "--precision"),
        ("--bf16", "--precision bf16"),
        ("--model x/y", "--init-from"),
        ("--data x", "--input"),
        ("--wandb", "--tensorboard"),
        ("--lora-dropout 0.1", "--override lora.dropout"),
        ("--merge", "orchestrate export"),
        ("--layerz 3", "--layers"),
        ("finetune --lr 1", "--learning-rate"),
        ("finetune --num_train_epochs 2", "--epochs N"),
        ("finetune --model_name_or_path x/y", "--model OWNER/NAME"),
        ("finetune --load_in_4bit", "--lora-rank N"),
        ("generate -m x", "without a flag"),
        ("generate --max_new_tokens 3", "--max-tokens"),
        ("generate --start x", "--prompt"),
        ("export --outtype q8_0", "--type"),
        ("push a/b --private", "nothing"),
        ("train --lr 1", "--override optimizer.learning_rate"),
        ("resume", "orchestrate train RUN --resume"),
        ("merge", "orchestrate export RUN --merge"),
        ("-m x", "--init-from"),
        ("evaluat", "orchestrate evaluate"),
    ],
)
def test_a_flag_of_another_program_leads_to_ours(words: str, hint: str, capfd: Captured) -> None:
    arguments = words.split()
    message = refused(capfd, *arguments)
    assert hint in message
    assert any(word in message for word in arguments), message


def test_fine_tuning_promises_no_data_set_of_its_own(capfd: Captured) -> None:
    assert cli._run(["finetune", "--help"]) == 0
    help_text = " ".join(capfd.readouterr().out.split())
    assert "A data set of conversations of the Hugging Face Hub." in help_text
    assert "Default: HuggingFaceFW/fineweb" not in help_text and "for ever" not in help_text


@pytest.mark.parametrize("words", ["--zebra", "generate --zebra", "--ll"])
def test_what_resembles_nothing_gets_no_guess(words: str, capfd: Captured) -> None:
    assert "type" not in refused(capfd, *words.split())


def test_every_training_habit_is_answered() -> None:
    for flag in habits.TRAINING:
        assert ": type " in habits.of_flag(flag, flags_of(GROUP), None), flag


@pytest.mark.parametrize(("text", "count"), [("1e3", 1000), ("10k", 10_000), ("20B", 20_000_000_000), ("1_000", 1000)])
def test_integers_are_read_as_people_write_them(
    text: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    requests: list[Any] = []

    def run(settings: Any) -> int:
        requests.append(settings)
        return 0

    monkeypatch.setattr("orchestrator.pipeline.run", run)
    assert cli._run(["--max-samples", text, f"--tokenizer_max_lines={text}"]) == 0
    assert (requests[0].max_samples, requests[0].tokenizer_max_lines) == (count, count)


def test_what_is_no_integer_is_refused(capfd: Captured) -> None:
    for text in ("1.5", "many", "1e-3", "10q"):
        assert "--steps" in refused(capfd, "--steps", text)


def test_the_home_folder_is_put_in_place_of_a_tilde(
    capfd: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words in (
        ["--config=~/nowhere.yaml"],
        ["plan", "~/nowhere.yaml"],
        ["generate", "--prompt=~", "--checkpoint=~/nowhere"],
        ["evaluate", "--experiment=x", "--base-model=~/nowhere"],
        ["export", "~/nowhere"],
        ["watch", "~/nowhere"],
    ):
        message = refused(capfd, *words)
        assert "~" not in message, words
    assert list(tmp_path.iterdir()) == []
    assert cli._run(["--input=~/nowhere", "--steps=5"]) == 3
    assert str(tmp_path / "nowhere") in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--dataset=./text"], "type --input ./text"),
        (["--dataset=text"], "type --input text"),
        (["--dataset=./my text"], "type --input './my text'"),
        (["--dataset=text/a.jsonl"], "type --input text/a.jsonl"),
        (["--dataset=gone.jsonl"], "type --input gone.jsonl"),
        (["--dataset=https://huggingface.co/datasets/acme/plain"], "type --dataset acme/plain"),
        (
            ["--dataset=https://huggingface.co/datasets/acme/plain/tree/v2"],
            "type --dataset acme/plain --revision v2",
        ),
        (["--dataset=hf://datasets/acme/plain@v2/a.parquet"], "type --dataset acme/plain --revision v2"),
        (["--dataset=https://example.com/a.parquet"], "type --input"),
        (["--dataset=acme/plain@v2"], "type --dataset acme/plain --revision v2"),
        (["--dataset=acme/plain:sample"], "type --dataset acme/plain --data-config sample"),
        (["--dataset=acme/plain", "--split=train[:10%]"], "type --split train --max-samples N"),
        (["--dataset=acme/plain", "--split=train[:500]"], "type --split train --max-samples 500"),
        (["--dataset=acme/plain", "--split=train+test"], "data.mixture"),
    ],
)
def test_a_data_set_is_named_as_it_has_to_be(
    flags: list[str], hint: str, capfd: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("{}")
    assert hint in refused(capfd, *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
