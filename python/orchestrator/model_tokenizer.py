"""Reads the tokenizer.json of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.command_error import CommandError
from orchestrator.paths import shown

FILE = "tokenizer.json"


def read(model: Path, vocab_size: int) -> dict[str, Any] | None:
    """Return the content of a model's tokenizer.json, None if it has none.

    Raises:
        CommandError: If the library tokenizers cannot read it, or it has ids beyond the model's vocabulary.
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
    last = max(ids(content).values(), default=0)
    if last >= vocab_size:
        raise CommandError(
            f"{shown(path)} has the id {last}, but the model has a vocabulary of {vocab_size}: it is another model's"
        )
    return content


def ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the id of every token, added ones included.

    A Unigram vocabulary is a list whose positions are the ids.
    """
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}}
