"""Reads the tokenizer.json of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.training_record import read_object

FILE = "tokenizer.json"
FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


def read(model: Path, vocab_size: int) -> dict[str, Any] | None:
    """Return the content of a model's tokenizer.json, None if it has none.

    Raises:
        CommandError: If the library tokenizers cannot read it, it has ids beyond the model's vocabulary, or a file
            beside it is no JSON.
    """
    from tokenizers import Tokenizer

    path = model / FILE
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        Tokenizer.from_str(text)
    except Exception as error:  # the package raises no other class
        raise CommandError(f"{shown(path)} is no tokenizer that can be read: {error}") from error
    content: dict[str, Any] = json.loads(text)
    check_fits(path, max(ids(content).values(), default=0), vocab_size)
    return content


def check_fits(path: Path, last_id: int, vocab_size: int) -> None:
    """Refuse a tokenizer.json with ids beyond the model's vocabulary, or beside a file that is no JSON."""
    if last_id >= vocab_size:
        raise CommandError(_too_many_tokens(path, last_id, vocab_size))
    for name in FILES_BESIDE:
        read_object(path.with_name(name))


def _too_many_tokens(path: Path, last_id: int, vocab_size: int) -> str:
    """Say what is wrong with a tokenizer that has ids beyond the model's vocabulary."""
    tokenizer = read_object(path)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    beyond = {token: index for token, index in ids(tokenizer).items() if index >= vocab_size}
    if not beyond.items() <= added.items():
        return (
            f"{shown(path)} has the id {last_id}, but the model has a vocabulary of {vocab_size}: it is another model's"
        )
    names = ", ".join(list(beyond)[:3]) + (", ..." if len(beyond) > 3 else "")
    return (
        f"{shown(path)} has added tokens up to the id {last_id} ({names}), but the model has a vocabulary of "
        f"{vocab_size}: `model.resize_token_embeddings({last_id + 1})` of transformers makes room for them; or remove "
        "them from the tokenizer"
    )


def ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the id of every token, added ones included.

    A Unigram vocabulary is a list whose positions are the ids.
    """
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}}
