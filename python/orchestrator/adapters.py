"""LoRA adapters in peft's format: what they are, and the model that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from orchestrator import _native, converted_adapters, pretrained, training_record
from orchestrator.command_error import CommandError
from orchestrator.input_files import read_text
from orchestrator.paths import shown
from orchestrator.run_files import CHAT_TEMPLATE
from orchestrator.training_record import Row

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters that have been verified together with their base model."""

    WEIGHTS: ClassVar[str] = "adapter_model.safetensors"

    folder: Path
    """Their folder, or a temporary one of plain adapters that compute the same."""
    base: Path
    """The folder of the base model."""
    is_recorded: bool
    """Whether they record the hashes of the base model's files, against which these have been verified."""
    rank: int
    scale: float
    """Factor of the update of a weight: W + scale * B A."""

    @property
    def repository(self) -> tuple[str, str] | None:
        """The base model's repository on the Hub and its commit; None for a model that is not from the Hub."""
        return training_record.repository_of(self.base)

    def config(self) -> Row:
        """Return the adapter_config.json to export: it names the base model's repository where there is one."""
        config = training_record.read_object(self.folder / ADAPTER_CONFIG)
        name, revision = self.repository or (str(self.base.absolute()), None)
        return config | {"base_model_name_or_path": name, "revision": revision}


def locate(name: str, flag: str) -> Path:
    """Return the directory of adapters: of a run its newest checkpoint, of `OWNER/NAME[@REVISION]` that in the cache.

    A run is named by its folder or its experiment.

    Args:
        name: A folder, a run or a repository.
        flag: The flag that the name was given with, for messages.
    """
    folder = pretrained.run_named(name) or pretrained.locate(name, flag, (ADAPTER_CONFIG, Adapters.WEIGHTS))
    return _native.model_directory(folder).absolute()


def own_chat_template(folder: Path, model: Path) -> Path | None:
    """Return the chat template that adapters were trained with, where it is another than their model's."""
    template = folder / CHAT_TEMPLATE
    if not template.exists():
        return None
    of_model = _native.model_tokens(model)["templates"].get("default", "")
    return None if read_text(template).rstrip("\n") == of_model.rstrip("\n") else template


def has_adapters(folder: Path) -> bool:
    """Whether a directory holds adapters of another model."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def open_adapters(folder: Path, base_model: str | None) -> Adapters:
    """Verify adapters and their model; those of a kind that plain ones can stand for are converted first.

    Args:
        folder: The directory of the adapters.
        base_model: A folder or a repository of the Hub, if the model is not where the adapters say.
    """
    base = base_folder(folder, base_model)
    folder = converted_adapters.plain(folder, base)
    adapters = _native.checked_adapters(folder, base)
    return Adapters(folder, Path(adapters["base_model"]), adapters["is_recorded"], adapters["rank"], adapters["scale"])


def base_folder(folder: Path, base_model: str | None) -> Path | None:
    """Return the folder of the base model of adapters, downloaded if it is a repository of the Hub.

    Args:
        folder: The directory of the adapters, or of a whole model, which has no base model.
        base_model: A folder or a repository of the Hub, as the flag names it.

    Returns:
        None if the model is where the adapters say.
    """
    name = base_model
    if name is None:
        name = named_base(folder) if has_adapters(folder) else ""
        if not name and has_adapters(folder):
            raise CommandError(
                f"the adapters in {shown(folder)} do not name their model (base_model_name_or_path in "
                f"{ADAPTER_CONFIG}): --base-model says where it is"
            )
        if Path(name).is_dir() or pretrained.REPOSITORY.fullmatch(name) is None:
            return None
    location = pretrained.locate(name, "--base-model")
    pretrained.download(name, location, "--base-model")
    return location


def named_base(folder: Path) -> str:
    """Return the base model that adapter_config.json names: a folder, or a repository of the Hub and its revision."""
    config = training_record.read_object(folder / ADAPTER_CONFIG)
    name, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    return f"{name}@{revision}" if revision and not Path(name).is_dir() else name
