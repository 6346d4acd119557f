"""Values of `--dataset` and `--split` that name no data set of the Hub, and what to type instead."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from orchestrator.command_error import CommandError

URL = re.compile(
    r"(?:hf://|(?:https?://)?[\w.-]+\.\w+(?::\d+)?/)datasets/(?P<name>[^/\s]+/[^/\s?#@]+)"
    r"(?:@(?P<pin>[^/\s]+)|/(?:tree|blob|resolve)/(?P<revision>[^/\s?#]+))?.*"
)
FILE_NAME = re.compile(r".*\.(parquet|json|jsonl|txt|csv|md|gz|zst)", re.IGNORECASE)
SLICE = re.compile(r"(?P<split>\w+)\[:(?P<rows>\d+)(?P<percent>%?)\]")


def check(dataset: str | None, split: str | None) -> None:
    """Refuse what is no data set's or split's name, and say what to type for it."""
    if dataset is not None and (instead := _instead_of_dataset(dataset)):
        raise CommandError(f"--dataset takes a data set's name, and {dataset} is {instead}")
    if split is not None and (instead := _instead_of_split(split)):
        raise CommandError(f"--split takes the name of one split, and {split} is {instead}")


def _instead_of_dataset(text: str) -> str | None:
    if url := URL.fullmatch(text):
        revision = url["pin"] or url["revision"]
        pinned = f" --revision {revision}" if revision not in (None, "main") else ""
        return f"an address: type --dataset {url['name']}{pinned}"
    if "://" in text:
        return "an address: download it, and type --input PATH"
    exists, is_name = Path(text).exists(), re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text)
    if text.startswith(("/", "./", "../", "~")) or FILE_NAME.fullmatch(text) or (exists and not is_name):
        kind = "a folder" if Path(text).is_dir() else "a file" if exists else "a path"
        return f"{kind}: type --input {shlex.quote(text)}"
    name, at, revision = text.partition("@")
    if at:
        return f"one with a revision: type --dataset {name} --revision {revision}"
    name, colon, config = text.partition(":")
    if colon:
        return f"one with a configuration: type --dataset {name} --data-config {config}"
    return None


def _instead_of_split(text: str) -> str | None:
    if part := SLICE.fullmatch(text):
        if part["percent"]:
            return f"a part of one: type --split {part['split']} --max-samples N, the first N documents"
        return f"a part of one: type --split {part['split']} --max-samples {part['rows']}"
    if "[" in text:
        return f"a part of one: type --split {text.partition('[')[0]} --max-samples N, the first N documents"
    if "+" in text:
        return "several: data.mixture of a config (--config FILE) reads several splits"
    return None
