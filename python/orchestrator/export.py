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


class Type(str, enum.Enum):
    """The types of a GGUF file's matrices."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


def run(checkpoint: Path | None, experiment: str | None, format: Format, kind: Type, out: Path | None) -> None:
    """Write the model of a checkpoint or an experiment, and say how it is used."""
    if (checkpoint is None) == (experiment is None):
        raise CommandError("say what to export: --experiment NAME or --checkpoint DIR")
    if format is Format.GGUF and importlib.util.find_spec("gguf") is None:
        raise CommandError("GGUF files are written by the package gguf: pip install 'transformer-candle[export]'")
    from orchestrator import gguf_file

    model = _native.model_directory(checkpoint, experiment)
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
