"""Writes a directory in Hugging Face's or peft's format: weights, configs, tokenizer, model card.

What only training needs, such as the optimizer's state, is left out.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from orchestrator import model_card
from orchestrator.adapters import ADAPTER_CONFIG
from orchestrator.command_error import CommandError, ExitCode, reason
from orchestrator.exported_model import GENERATION_CONFIG, Kind, Model
from orchestrator.paths import shown
from orchestrator.safetensors_shards import write_shards
from orchestrator.temporary_folder import removed, staging_of
from orchestrator.training_record import Row
from orchestrator.written_files import sync

MAX_SHARD_SIZE = "5GB"
LARGEST_NUMBER = 2**53
SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[KMGT]B)?", re.IGNORECASE)


def checked_size(text: str) -> int | str:
    """Return a shard size as `split_state_dict_into_shards_factory` takes it: `5GB`, `500MB`, or bytes."""
    matched = SIZE.fullmatch(text.replace(" ", ""))
    if matched is None or float(matched["number"]) == 0 or (matched["unit"] is None and "." in text):
        raise CommandError(f"--max-shard-size {text}: give a number of bytes, or one with KB, MB, GB or TB, as 5GB")
    if float(matched["number"]) > LARGEST_NUMBER:
        raise CommandError("--max-shard-size is larger than any disk: give a size such as 5GB")
    return matched[0].upper() if matched["unit"] else int(matched["number"])


def write(model: Model, target: Path, max_shard_size: int | str) -> None:
    """Write the model to the folder `target`, complete or not at all."""
    target = target.absolute()
    with removed(staging_of(target)) as staging:
        fill(model, staging, model.name, target.name, max_shard_size)
        for path in [*staging.rglob("*"), staging]:
            sync(path)
        staging.rename(target)  # over an empty folder at most
    sync(target.parent)


def fill(model: Model, folder: Path, name: str, source: str, max_shard_size: int | str) -> None:
    """Write the model's files into a folder; its card calls it `name` and says to load it from `source`."""
    card = model_card.written(model, name, source)
    try:
        for file, place in model.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(place, folder / file)
        if model.generation:
            _write_json(folder / GENERATION_CONFIG, model.generation)
        if model.kind is Kind.ADAPTERS:
            _write_json(folder / ADAPTER_CONFIG, model.config)
        else:
            write_shards(model.tensors, folder, max_shard_size)
        (folder / model_card.FILE).write_text(card, encoding="utf-8")
    except OSError as error:
        message = f"cannot copy {shown(model.folder)} to {shown(folder)}: {reason(error)}"
        raise CommandError(message, ExitCode.UNEXPECTED) from error


def _write_json(file: Path, content: Row) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def files_of(folder: Path) -> dict[str, int]:
    """Return the bytes of every file in a folder, by its path relative to it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return dict(sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in files))


def check_target(target: Path) -> None:
    """Raise a `CommandError` unless `target` can be made: it is new or an empty folder, in a folder that exists."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CommandError(f"--out {shown(target)} is a file or a link: name a folder")
    if target.is_dir() and any(target.iterdir()):
        raise CommandError(f"--out {shown(target)} is not empty: name another folder, or remove it")
    if not target.absolute().parent.is_dir():
        raise CommandError(f"--out {shown(target)}: there is no folder {shown(target.absolute().parent)}")
