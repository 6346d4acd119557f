"""The tensors of a model directory, and their way into safetensors files: copied byte by byte, in their own types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.command_error import CommandError, ExitCode
from orchestrator.input_files import check_regular
from orchestrator.paths import shown

if TYPE_CHECKING:
    import numpy as np
    from huggingface_hub import SafetensorsFileMetadata
    from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
PIECE = 16 << 20
"""Bytes copied at a time, which is all that is in memory of a tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and where its bytes are."""

    dtype: str
    shape: list[int]
    elements: int
    file: Path
    start: int
    size: int

    def values(self) -> NDArray[np.float32]:
        """Return the numbers as f32, to which each of the types that are read widens exactly."""
        import numpy as np

        raw_bytes = np.memmap(self.file, mode="r", offset=self.start, shape=self.size)
        values: NDArray[np.float32]
        if self.dtype == "BF16":
            values = (raw_bytes.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw_bytes.view({"F32": "<f4", "F16": "<f2"}[self.dtype]).astype(np.float32)
        shaped: NDArray[np.float32] = values.reshape(self.shape)
        return shaped

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of at most `PIECE`."""
        with self.file.open("rb") as source:
            source.seek(self.start)
            remaining = self.size
            while remaining:
                piece = source.read(min(remaining, PIECE))
                if not piece:
                    message = f"{shown(self.file)} is corrupted: it was cut while it was read"
                    raise CommandError(message, ExitCode.CHECKPOINT_CORRUPTED)
                yield piece
                remaining -= len(piece)


def stored_tensors(model: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory in the order of its layers, after a look at every file's header."""
    from huggingface_hub import get_local_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    for file in model.glob("*.safetensors*"):
        check_regular(file)
    try:
        with _corruption_told(model):
            files = get_local_safetensors_metadata(model).files_metadata
    except NotASafetensorsRepoError as error:
        raise CommandError(f"{shown(model)} has neither model.safetensors nor {INDEX}") from error
    except FileNotFoundError as error:
        raise CommandError(f"{INDEX} of {shown(model)} names {error.filename}, which is not there") from error
    return _in_order((model / name, metadata) for name, metadata in files.items())


def tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file in the order of a model's layers."""
    from huggingface_hub import parse_local_safetensors_file_metadata

    check_regular(path)
    with _corruption_told(path):
        metadata = parse_local_safetensors_file_metadata(path)
    return _in_order([(path, metadata)])


@contextmanager
def _corruption_told(place: Path) -> Iterator[None]:
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        yield
    except (SafetensorsParsingError, ValueError, KeyError) as error:
        message = f"a safetensors file of {shown(place)} is corrupted: {error}"
        raise CommandError(message, ExitCode.CHECKPOINT_CORRUPTED) from error


def _in_order(files: Iterable[tuple[Path, SafetensorsFileMetadata]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path, metadata in files:
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
        for tensor, info in metadata.tensors.items():
            first, end = info.data_offsets
            if data + end > path.stat().st_size:
                message = f"{shown(path)} is corrupted: it ends before {tensor} does"
                raise CommandError(message, ExitCode.CHECKPOINT_CORRUPTED)
            shape, elements = list(info.shape), info.parameter_count
            tensors[tensor] = StoredTensor(info.dtype, shape, elements, path, data + first, end - first)
    return dict(sorted(tensors.items(), key=lambda item: _by_number(item[0])))


def write_shards(tensors: dict[str, StoredTensor], folder: Path, max_shard_size: int | str) -> None:
    """Write `model.safetensors`, or several files of at most `max_shard_size` and their index.

    A tensor that is larger than `max_shard_size` has a file of its own.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for name, tensor_names in split.filename_to_tensors.items():
        _write(folder / name, {tensor: tensors[tensor] for tensor in tensor_names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write a safetensors file: the length of a JSON header in 8 bytes, the header, the tensors without gaps."""
    # Wide types first, as the safetensors library sorts them, so that each tensor is aligned to its type.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].size // max(item[1].elements, 1)))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered.values():
            for piece in tensor.pieces():
                target.write(piece)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
