"""`orchestrate export`: a model in the format of another program."""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path

from orchestrator import _native
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.screen import amount, step


class Format(str, enum.Enum):
    """What is written."""

    GGUF = "gguf"
    HF = "hf"


class Type(str, enum.Enum):
    """The types of a GGUF file's matrices."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


def run(
    checkpoint: Path | None,
    experiment: str | None,
    format: Format,
    kind: Type | None,
    max_shard_size: str | None,
    out: Path | None,
) -> None:
    """Write the model of a checkpoint or an experiment, and say how it is used."""
    check_one_source(checkpoint, experiment, "export")
    if format is Format.HF:
        if kind is not None:
            raise CommandError(f"--type {kind.value} is for --format gguf: --format hf keeps the types of the weights")
        _write_directory(checkpoint, experiment, max_shard_size, out)
    else:
        if max_shard_size is not None:
            raise CommandError("--max-shard-size is for --format hf: --format gguf writes one file")
        _write_gguf(checkpoint, experiment, kind or Type.F16, out)


def check_one_source(checkpoint: Path | None, experiment: str | None, verb: str) -> None:
    """Raise a `CommandError` unless the model is named in one of the two ways."""
    if (checkpoint is None) == (experiment is None):
        raise CommandError(f"say what to {verb}: --experiment NAME or --checkpoint DIR")


def whole_model_directory(checkpoint: Path | None, experiment: str | None) -> Path:
    """Return the directory of the model that is named; LoRA adapters are none by themselves."""
    folder = _native.model_directory(checkpoint, experiment)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CommandError(
            f"{shown(folder)} holds LoRA adapters, not a whole model: peft loads it as it is "
            "(PeftModel.from_pretrained), and merge_and_unload().save_pretrained(DIR) writes one that can be exported"
        )
    return folder


def try_it(source: str, revision: str | None = None) -> str:
    """Return the command that completes a text with a folder's or a repository's model."""
    at = f", revision='{revision}'" if revision else ""
    call = f"print(pipeline('text-generation', '{source}'{at})('Once upon a time')[0]['generated_text'])"
    return f'python -c "from transformers import pipeline; {call}"'


def _write_directory(checkpoint: Path | None, experiment: str | None, size: str | None, out: Path | None) -> None:
    from orchestrator import hf_directory

    max_shard_size = hf_directory.checked_size(size or hf_directory.MAX_SHARD_SIZE)
    if out is not None:
        hf_directory.check_target(out)
    model = hf_directory.open_model(checkpoint, experiment)
    target = out or Path(f"{model.name}-hf")
    hf_directory.check_target(target)
    step("model", shown(model.folder))
    hf_directory.write(model, target, max_shard_size)
    count, size_of_all = hf_directory.files_of(target)
    step("wrote", f"{shown(target)} ({count} files, {amount(size_of_all)})")
    step("try it", try_it(str(target)))


def _write_gguf(checkpoint: Path | None, experiment: str | None, kind: Type, out: Path | None) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise CommandError("GGUF files are written by the package gguf: pip install 'transformer-candle[export]'")
    from orchestrator import gguf_file

    model = whole_model_directory(checkpoint, experiment)
    name = experiment or model.absolute().name
    target = out or Path(f"{name}-{kind.value}.gguf")
    if target.is_dir():
        raise CommandError(f"--out {shown(target)} is a folder: name the file")
    if not target.absolute().parent.is_dir():
        raise CommandError(f"--out {shown(target)}: there is no folder {shown(target.absolute().parent)}")
    step("model", shown(model))
    gguf_file.write(model, target, kind.value, name)
    step("wrote", f"{shown(target)} ({amount(target.stat().st_size)})")
    step("try it", f"llama-cli -m {target} -no-cnv -p 'Once upon a time'")
