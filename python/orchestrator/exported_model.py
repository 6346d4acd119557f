"""A model to export: as it is, with its LoRA adapters merged into it, or the adapters alone."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import _native, model_tokenizer, training_record
from orchestrator.adapters import ADAPTER_CONFIG, Adapters, has_adapters, open_adapters
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.model_source import Source
from orchestrator.model_tokenizer import ModelTokens
from orchestrator.paths import shown
from orchestrator.safetensors_shards import StoredTensor, stored_tensors, tensors_of_file
from orchestrator.training_record import Row, TrainingRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files of a tokenizer that an export copies unchanged, where they exist."""
TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates other than the default one."""
F16_MAX = 65504
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


class Kind(enum.Enum):
    """Which weights are exported: a whole model's, those with adapters merged into them, or adapters alone."""

    WHOLE = enum.auto()
    MERGED = enum.auto()
    ADAPTERS = enum.auto()


@dataclass(frozen=True)
class Model:
    """A model that is exported: the headers of its files, and how it was trained."""

    kind: Kind
    folder: Path
    name: str
    config: Row
    """The content of config.json, or of the adapter_config.json to export."""
    checked_config: Row
    """The config.json of the whole model with every key."""
    tensors: dict[str, StoredTensor]
    record: TrainingRecord
    files: dict[str, Path]
    """The files to copy unchanged, by their names in the exported folder."""
    adapters: Adapters | None = None
    """The adapters that are merged into the weights or exported alone; None for a model without."""
    generation: Row = dataclasses.field(default_factory=dict)
    """The content of generation_config.json: where generation stops, padding, sampling."""
    tokens: ModelTokens | None = None
    """Its tokenizer; None for a model without."""

    @property
    def base_model(self) -> tuple[str, str] | None:
        """The repository of the Hub and its commit that training started from; None without a model of the Hub."""
        return self.adapters.repository if self.adapters else self.record.base_model

    @property
    def tokenizer_folder(self) -> Path:
        """The directory of its tokenizer."""
        return self.files.get("tokenizer.json", self.folder / "tokenizer.json").parent

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered for it."""
        return self.tokens is not None and bool(self.tokens.templates)


@dataclass(frozen=True)
class MergedTensor(StoredTensor):
    """A weight with an adapter, whose values are W + scale * B A in f32."""

    down: StoredTensor
    """Matrix A of the adapter, [rank, inputs]."""
    up: StoredTensor
    """Matrix B of the adapter, [outputs, rank]."""
    scale: float

    def values(self) -> NDArray[np.float32]:
        """Return the merged numbers, or raise a `CommandError` if they are not all finite."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.float32(self.scale) * self.up.values()
            merged: NDArray[np.float32] = super().values() + scaled @ self.down.values()
        self._check_finite(np.isfinite(merged))
        return merged

    def _check_finite(self, is_finite: NDArray[np.bool_]) -> None:
        wrong = is_finite.size - int(is_finite.sum())
        if wrong:
            raise CommandError(
                f"merging {shown(self.down.file)} at the scale {self.scale:g} (lora_alpha / r) gives weights that are "
                f"not finite, {wrong:,} of {is_finite.size:,} in the first such matrix: they or their config are wrong",
                ExitCode.CHECKPOINT_CORRUPTED,
            )

    def pieces(self) -> Iterator[bytes]:
        """Yield the merged values, rounded once to the type that the weight is stored in."""
        import numpy as np

        values = self.values()
        if self.dtype == "BF16":
            bits = values.view(np.uint32)
            # To the nearest, ties to even; finite numbers only.
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
            self._check_finite((rounded & np.uint32(0x7F80)) != np.uint32(0x7F80))
            yield rounded.astype("<u2").tobytes()
            return
        if self.dtype == "F16" and np.abs(values).max(initial=0) > F16_MAX:
            raise CommandError(f"a merged weight of {shown(self.file)} is over {F16_MAX}, the largest number of f16")
        yield values.astype({"F32": "<f4", "F16": "<f2"}[self.dtype]).tobytes()


def open_whole(source: Source) -> Model:
    """Find a checkpoint or model, verify it, and read how it was trained."""
    folder = source.folder()
    if has_adapters(folder):
        raise CommandError(
            f"{shown(folder)} holds LoRA adapters, not a whole model: --merge exports the model with them, "
            "--format adapter the adapters alone"
        )
    checked = json.loads(_native.checked_model_config(folder))
    files = {CONFIG: folder / CONFIG, **_files(folder, folder)}
    config = training_record.read_object(folder / CONFIG)
    name, record = _name_and_record(source, folder)
    model = Model(Kind.WHOLE, folder, name, config, checked, stored_tensors(folder), record, files)
    return _with_tokens(model, folder)


def open_merged(source: Source) -> Model:
    """Like `open_whole`, for LoRA adapters merged into their base model, which is verified too."""
    folder, adapters = _open_adapters(source, "there is nothing to merge, leave out --merge")
    base = adapters.base
    checked = json.loads(_native.checked_model_config(base, read_weights=not adapters.is_recorded))
    added = tensors_of_file(adapters.folder / adapters.WEIGHTS)
    tensors = {name: _merged(name, tensor, added, adapters) for name, tensor in stored_tensors(base).items()}
    files = {CONFIG: base / CONFIG, **_files(folder, base)}
    config = training_record.read_object(base / CONFIG)
    name, record = _name_and_record(source, folder)
    model = Model(Kind.MERGED, folder, name, config, checked, tensors, record, files, adapters)
    return _with_tokens(model, base)


def open_adapters_alone(source: Source) -> Model:
    """Find LoRA adapters, verify them and their base model, and read how they were trained."""
    folder, adapters = _open_adapters(source, "--format hf and --format gguf export it")
    base = adapters.base
    checked = json.loads(_native.checked_model_config(base, read_weights=False))
    weights = adapters.folder / adapters.WEIGHTS
    tensors, files = tensors_of_file(weights), {adapters.WEIGHTS: weights, **_files(folder, base)}
    name, record = _name_and_record(source, folder)
    model = Model(Kind.ADAPTERS, folder, name, adapters.config(), checked, tensors, record, files, adapters)
    return _with_tokens(model, base)


def _with_tokens(model: Model, base: Path) -> Model:
    """Return the model with its tokenizer and generation settings; refuse one whose tokenizer is another model's."""
    folder, base_model = (model.folder, None) if model.adapters is None else (model.adapters.folder, base)
    tokens = model_tokenizer.read(folder, model.tokenizer_folder, base_model, model.checked_config["vocab_size"])
    model = dataclasses.replace(model, tokens=tokens, generation=_generation(model.folder, base))
    if not model.folder.exists():
        # Files that are missing read as empty, so that this one may have been read in part.
        raise FileNotFoundError(f"{shown(model.folder)} was removed while it was read")
    return model


def _generation(folder: Path, base: Path) -> Row:
    """Return the generation settings: those of a base model, such as sampling, with the adapters' own tokens."""
    of_base, own = (training_record.read_object(place / GENERATION_CONFIG) for place in (base, folder))
    settings = {**of_base, **own}
    if of_base.keys() - own.keys() - {"transformers_version"}:
        settings.pop("_from_model_config", None)  # transformers would make the settings anew from config.json
    return settings


def _open_adapters(source: Source, otherwise: str) -> tuple[Path, Adapters]:
    """Return the folder of the adapters that are named, and the adapters as plain ones."""
    folder = source.folder()
    if not has_adapters(folder):
        raise CommandError(f"{shown(folder)} is a whole model, without {ADAPTER_CONFIG}: {otherwise}")
    return folder, open_adapters(folder, source.base_model)


def _name_and_record(source: Source, folder: Path) -> tuple[str, TrainingRecord]:
    run = training_record.run_of(folder, source.checkpoint, source.experiment)
    name = source.experiment or (run or folder).absolute().name
    return name, training_record.read(folder, run)


def _files(folder: Path, base: Path) -> dict[str, Path]:
    """Return the files beside the weights: adapters without a tokenizer of their own have their base model's."""
    owner = folder if (folder / "tokenizer.json").is_file() else base
    templates = sorted(f"{TEMPLATES}/{path.name}" for path in (owner / TEMPLATES).glob("*.jinja"))
    return {name: owner / name for name in (*TOKENIZER_FILES, *templates) if (owner / name).is_file()}


def _merged(name: str, tensor: StoredTensor, added: dict[str, StoredTensor], adapters: Adapters) -> StoredTensor:
    """Return a tensor of the base model, merged with its adapter if it has one."""
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    down = added.get(f"{prefix}.lora_A.weight")
    if down is None:
        return tensor
    fields = {part.name: getattr(tensor, part.name) for part in dataclasses.fields(tensor)}
    return MergedTensor(**fields, down=down, up=added[f"{prefix}.lora_B.weight"], scale=adapters.scale)
