"""The tokenizer of a model directory, with its special tokens and chat templates."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import _native, tokenizer
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.training_record import read_object

FILE = "tokenizer.json"
FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class ModelTokens:
    """A tokenizer and its special tokens, as training and `orchestrate chat` use them."""

    tokenizer_json: dict[str, Any]
    """The content of tokenizer.json, with the tokens that the files beside it add."""
    roles: dict[str, str]
    """Tokens by role, such as `bos_token`."""
    adds_bos: bool | None
    """`add_bos_token` of tokenizer_config.json."""
    templates: dict[str, str]
    """Chat templates by name."""
    stop_tokens: list[int]
    """Ids at which generation stops, of which the first ends a document."""
    end_of_turn: int | None
    """The id that ends the assistant's turn."""
    conversations_start_with_bos: bool | None
    """Whether the chat template starts with the BOS token; None without one that can be used."""
    left_out: list[str]
    """Tokens for which the model has no embedding."""

    def ids(self) -> dict[str, int]:
        """Return the id of every token, added ones included."""
        return ids(self.tokenizer_json)

    def all_stop_tokens(self) -> list[int]:
        """Return the ids at which an answer ends in `orchestrate chat`."""
        ids = [*self.stop_tokens, *([] if self.end_of_turn is None else [self.end_of_turn])]
        return list(dict.fromkeys(ids))

    def ordered_templates(self) -> list[tuple[str, str]]:
        """Return names and sources of the chat templates, first that of conversations without tools, as `default`."""
        names = sorted(self.templates, key=lambda name: name != "default")
        return [("default" if index == 0 else name, self.templates[name]) for index, name in enumerate(names)]


def read(model: Path, tokenizer_folder: Path, base_model: Path | None, vocab_size: int) -> ModelTokens | None:
    """Return the tokens of a model, None if it has no tokenizer.json.

    Args:
        model: Its directory, or that of adapters.
        tokenizer_folder: The directory of its tokenizer.
        base_model: The model of adapters.
        vocab_size: Number of its embeddings.

    Raises:
        CommandError: If the library tokenizers cannot read tokenizer.json, it has ids beyond the model's vocabulary, or
            a file beside it is no JSON.
    """
    path = tokenizer_folder / FILE
    if not path.exists():
        return None
    tokenizer.read(path)
    check_fits(path, vocab_size)
    today = datetime.datetime.now().astimezone().date().isoformat()
    return ModelTokens(**_native.model_tokens(model, base_model=base_model, date=today))


def check_fits(path: Path, vocab_size: int) -> None:
    """Refuse a tokenizer.json with ids beyond the model's vocabulary, or beside a file that is no JSON."""
    if (last_id := _native.vocab_size(path) - 1) >= vocab_size:
        raise CommandError(_too_many_tokens(path, last_id, vocab_size))
    for name in FILES_BESIDE:
        read_object(path.with_name(name))


def _too_many_tokens(path: Path, last_id: int, vocab_size: int) -> str:
    """Say what is wrong with a tokenizer that has ids beyond the model's vocabulary."""
    content = read_object(path)
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    beyond = {token: index for token, index in ids(content).items() if index >= vocab_size}
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


def ids(tokenizer_json: dict[str, Any]) -> dict[str, int]:
    """Return the id of every token, added ones included.

    A Unigram vocabulary is a list whose positions are the ids.
    """
    vocabulary = tokenizer_json["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer_json.get("added_tokens") or []}}
