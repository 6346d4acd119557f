"""Finds the model that training starts from: a folder, a run's newest checkpoint, or a repository of the Hub."""

from __future__ import annotations

from pathlib import Path

from orchestrator import _native, adapters, pretrained
from orchestrator.command_error import CommandError
from orchestrator.input_files import POINTERS, followed
from orchestrator.paths import quoted, shown
from orchestrator.screen import note


def locate(name: str, flag: str) -> Path:
    """Return the folder of a whole model; of a run, named by its folder or its experiment, the newest checkpoint's.

    Args:
        name: What was typed.
        flag: The flag that it was typed for, which messages name.
    """
    name = str(followed(Path(name))) if Path(name).name in POINTERS else name
    run = pretrained.run_named(name)
    folder = run or pretrained.locate(name, flag, (pretrained.CONFIG, adapters.ADAPTER_CONFIG))
    if run is not None:
        folder = _native.model_directory(run).absolute()
    if adapters.has_adapters(folder):
        raise CommandError(
            f"{flag} {name}: {'its newest checkpoint' if run else 'the folder'} holds LoRA adapters, not a model: "
            f"`--lora-init-from {quoted(Path(name))}` trains them on, and `orchestrate export --checkpoint "
            f"{quoted(folder.absolute())} --merge --format hf` makes a model of them"
        )
    if not (folder / pretrained.CONFIG).exists():
        raise CommandError(
            f"{flag} {name}: {shown(folder / pretrained.CONFIG)}: there is no such file; name the folder of a Llama, "
            "Mistral, Qwen2 or Qwen3 model in Hugging Face's format"
        )
    if run is not None:
        note(f"{flag} {name} is a run: training starts from its newest checkpoint, {shown(folder)}.")
    return folder
