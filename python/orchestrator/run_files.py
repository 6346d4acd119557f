"""The files that describe a run, in its own folder: streaming_config.json, training.yaml, special_tokens.txt."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator import _native, tokenizer
from orchestrator.command_error import CommandError, reason
from orchestrator.input_files import parse_json, read_bytes, read_text, readable
from orchestrator.paths import shown
from orchestrator.written_files import replace

STREAMING_CONFIG = "streaming_config.json"
TRAINING_CONFIG = "training.yaml"
SPECIAL_TOKENS = "special_tokens.txt"
TOKENIZER = Path("tokenizer", "tokenizer.json")
"""The run's own copy of its tokenizer, in the run's folder."""
CHAT_TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates other than the default one, such as that of conversations with tools."""
MODEL_FILES = ("generation_config.json", "config.json", "added_tokens.json", CHAT_TEMPLATE)
"""Files of a model's folder: any may be the only one that names the tokens that begin and end a document or a turn."""


def write_streaming_config(folder: Path, streaming: dict[str, Any] | None) -> Path | None:
    """Write streaming_config.json; remove a former one where nothing is streamed, as `train` goes by its presence."""
    path = folder / STREAMING_CONFIG
    if streaming is None:
        path.unlink(missing_ok=True)
        return None
    replace(path, json.dumps(streaming, indent=2) + "\n")
    return path


def write_training_config(folder: Path, text: str) -> tuple[Path, Path | None]:
    """Write training.yaml; one that says something else is kept beside it. Return both paths."""
    path = folder / TRAINING_CONFIG
    former = None
    if path.exists() and read_text(path) != text:
        former = path.with_suffix(".yaml.old")
        path.replace(former)
    replace(path, text)
    return path, former


def copy_tokenizer(folder: Path, ready: tokenizer.Ready) -> None:
    """Copy a tokenizer and the files that belong to it into the run, which then no longer needs the originals."""
    tokenizer_json, own = ready.path, folder / TOKENIZER
    if own.exists() and own.samefile(tokenizer_json):
        return
    own.parent.mkdir(exist_ok=True)
    # Before the first of them changes: a manifest records the hashes of the files beside it.
    (own.parent / tokenizer.MANIFEST).unlink(missing_ok=True)
    for name in (*MODEL_FILES, *tokenizer.FILES):
        source = tokenizer_json if name == TOKENIZER.name else tokenizer_json.with_name(name)
        target = own.with_name(name)
        if source.is_file():
            replace(target, read_bytes(source))
        else:
            target.unlink(missing_ok=True)
    _remove_other_templates(folder)
    for template in sorted((tokenizer_json.parent / OTHER_TEMPLATES).glob("*.jinja")):
        target = own.parent / OTHER_TEMPLATES / template.name
        target.parent.mkdir(exist_ok=True)
        replace(target, read_bytes(template))
    if ready.facts is not None and tokenizer.facts(own.parent) != ready.facts:
        raise CommandError(f"{shown(tokenizer_json.parent)} was retrained by another command meanwhile: start again")


def keep_chat_template(folder: Path, template_path: str) -> None:
    """Copy the chat template that a config names into the run, beside the run's tokenizer, in place of all others."""
    try:
        template = read_text(Path(template_path))
    except (OSError, UnicodeDecodeError) as error:
        built_in = " and ".join(f"`{name}`" for name in _native.BUILT_IN_CHAT_TEMPLATES)
        message = f"cannot read the chat template (data.chat_template) {template_path}: {reason(error)}"
        raise CommandError(f"{message}; name a Jinja file, or a built-in one: there are {built_in}") from error
    _remove_other_templates(folder)
    replace((folder / TOKENIZER).with_name(CHAT_TEMPLATE), template)


def _remove_other_templates(folder: Path) -> None:
    shutil.rmtree((folder / TOKENIZER).with_name(OTHER_TEMPLATES), ignore_errors=True)


def write_special_tokens(folder: Path, tokens: list[str]) -> Path:
    """Write special_tokens.txt."""
    path = folder / SPECIAL_TOKENS
    replace(path, json.dumps(tokens, ensure_ascii=False) + "\n")
    return path


def read_special_tokens(path: Path) -> list[str]:
    """Return the tokens of a special_tokens.txt: a JSON array, or one token per line; empty if there is no file."""
    with readable(f"the special tokens {shown(path)}"), suppress(FileNotFoundError):
        text = read_text(path).strip()
        tokens = parse_json(text) if text.startswith("[") else [line for line in text.splitlines() if line.strip()]
        return [str(token) for token in tokens]
    return []


def read_streaming_config(folder: Path) -> dict[str, Any] | None:
    """Return streaming_config.json, which has at least a data set and a split; None where the run streams none."""
    path = folder / STREAMING_CONFIG
    with readable(shown(path)), suppress(FileNotFoundError):
        streaming: dict[str, Any] = parse_json(read_text(path))
        return {**streaming, "dataset": str(streaming["dataset"]), "split": str(streaming["split"])}
    return None
