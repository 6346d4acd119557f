"""`orchestrate export`: a model in the format of another program."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import extras
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.screen import amount, note, step

if TYPE_CHECKING:
    from orchestrator.exported_model import Model
    from orchestrator.model_source import Source


class Format(str, enum.Enum):
    """The formats of `orchestrate export`."""

    GGUF = "gguf"
    HF = "hf"
    ADAPTER = "adapter"


class Type(str, enum.Enum):
    """The types of a GGUF file's matrices."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


@dataclass(frozen=True)
class Request:
    """The options of `orchestrate export`."""

    source: Source
    format: Format
    merge: bool
    type: Type | None
    max_shard_size: str | None
    out: Path | None
    overwrite: bool
    """Whether `out` may be another program's file."""


def default_format(type: Type | None, out: Path | None) -> Format:
    """Return the format where none is typed: GGUF, or hf where the package that writes GGUF is not installed.

    A type of GGUF's or a file's name that ends in `.gguf` ask for GGUF.
    """
    if type is not None or (out is not None and out.suffix.lower() == ".gguf") or _writes_gguf():
        return Format.GGUF
    note(f"--format hf, a folder for transformers and vLLM: {_needs_package()}")
    return Format.HF


def _needs_package() -> str:
    return f"GGUF files are written by the package gguf: {extras.install_command('export')}"


def _writes_gguf() -> bool:
    return importlib.util.find_spec("gguf") is not None


def run(request: Request) -> None:
    """Write the model of a checkpoint or an experiment, and say how it is used."""
    _check(request)
    write = _write_gguf if request.format is Format.GGUF else _write_directory
    request.source.read(lambda source: write(dataclasses.replace(request, source=source)))


def _check(request: Request) -> None:
    """Refuse options that the format does not have."""
    format = request.format
    if request.type is not None and format is not Format.GGUF:
        reason = f"--format {format.value} keeps the types of the weights"
        raise CommandError(f"--type {request.type.value} is for --format gguf: {reason}")
    if request.overwrite and format is not Format.GGUF:
        raise CommandError("--overwrite is for --format gguf: a folder is never replaced, name a new or an empty one")
    if request.max_shard_size is not None and format is not Format.HF:
        raise CommandError(f"--max-shard-size is for --format hf: --format {format.value} writes one file of weights")
    if request.merge and format is Format.ADAPTER:
        raise CommandError("--merge is for --format hf and --format gguf: --format adapter writes the adapters alone")
    if request.source.base_model is not None and not request.merge and format is not Format.ADAPTER:
        raise CommandError("--base-model says where the model of adapters is: give it with --merge or --format adapter")


def opened(source: Source, merge: bool, alone: bool) -> Model:
    """Open the model that is named, with its adapters merged, or its adapters alone."""
    from orchestrator import exported_model

    if alone:
        return exported_model.open_adapters_alone(source)
    return exported_model.open_merged(source) if merge else exported_model.open_whole(source)


def try_it(model: Model, source: str, revision: str | None = None) -> str:
    """Return a command that generates text with the exported model, loaded from a folder or a repository."""
    at = f", revision='{revision}'" if revision else ""
    prompt = "[dict(role='user', content='Hello!')]" if model.has_chat_template else "'Once upon a time'"
    call = f"print(pipeline('text-generation', '{source}'{at})({prompt})[0]['generated_text'])"
    return f'python -c "from transformers import pipeline; {call}"'


def _write_directory(request: Request) -> None:
    from orchestrator import hf_directory

    max_shard_size = hf_directory.checked_size(request.max_shard_size or hf_directory.MAX_SHARD_SIZE)
    if request.out is not None:
        hf_directory.check_target(request.out)
    model = opened(request.source, request.merge, request.format is Format.ADAPTER)
    target = request.out or Path(f"{model.name}-{request.format.value}")
    hf_directory.check_target(target)
    _show(model)
    hf_directory.write(model, target, max_shard_size)
    sizes = hf_directory.files_of(target).values()
    step("wrote", f"{shown(target)} ({len(sizes)} files, {amount(sum(sizes))})")
    step("try it", try_it(model, str(target)))


def _show(model: Model) -> None:
    step("model", shown(model.folder))
    if model.adapters is not None:
        step("base", shown(model.adapters.base))


def _write_gguf(request: Request) -> None:
    if not _writes_gguf():
        raise CommandError(_needs_package())
    from orchestrator import gguf_file

    model = opened(request.source, request.merge, alone=False)
    kind = request.type or Type.F16
    target = request.out or Path(f"{model.name}-{kind.value}.gguf")
    _check_target(target, request.overwrite)
    _show(model)
    notes = gguf_file.write(model, target, kind.value)
    step("wrote", f"{shown(target)} ({amount(target.stat().st_size)})")
    for remark in notes:
        note(remark)
    step("try it", f"llama-cli -m {target} " + ("-cnv" if model.has_chat_template else "-no-cnv -p 'Once upon a time'"))


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse to replace anything but a GGUF file of ours, or with `overwrite` a file."""
    from orchestrator import gguf_file

    if not target.absolute().parent.is_dir():
        raise CommandError(f"--out {shown(target)}: there is no folder {shown(target.absolute().parent)}")
    if target.is_dir():
        raise CommandError(f"--out {shown(target)} is a folder: name the file")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise CommandError(f"--out {shown(target)} is a link, a pipe or a device, not a file: name another one")
    if target.exists() and not overwrite and not gguf_file.is_own(target):
        raise CommandError(f"--out {shown(target)} is no export of this program: name another file, or add --overwrite")
