"""Adapters of peft that plain LoRA adapters can stand for, written as such.

peft lets ranks, scales and the set of layers differ from module to module, and starts PiSSA and OLoRA (Meng et al.,
2024; Büyükakyüz, 2024) by subtracting a part from the model's weights, and does so again wherever the adapters are
loaded. With plain adapters of one rank R and scale 1, a module's update is B A; so

    s * B' A' - P  =  [s * B', -U] [A'; V]    where U V = P is what was subtracted, and zeros fill up the rank.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from orchestrator import _native, training_record
from orchestrator.command_error import CommandError
from orchestrator.paths import shown
from orchestrator.safetensors_shards import StoredTensor, stored_tensors, tensors_of_file
from orchestrator.temporary_folder import until_exit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix: TypeAlias = NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MERGED_KEYS = ("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Keys whose effect is merged into the matrices."""
NEUTRAL_VALUES: tuple[Any, ...] = (None, [], {}, "")
USUAL_TARGET = re.compile(r"(?:self_attn\.|mlp\.)?[a-z_]+")
"""A name in `target_modules` that stands for a projection of every layer."""
SUBTRACTIVE_INITIALIZATIONS = ("pissa", "olora")
"""Values of `init_lora_weights` with which peft subtracts a part from the model's weights."""
PROJECTION = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.([a-z]+_proj)")
OTHER_TARGETS = ("model.embed_tokens", "lm_head")
"""Modules that peft can adapt and the decoder cannot."""


@dataclass(frozen=True)
class Settings:
    """An adapter_config.json, as peft applies it to modules."""

    file: Path
    config: dict[str, Any]

    @property
    def subtraction(self) -> str | None:
        """`pissa` or `olora`, if a part is subtracted from the model's weights."""
        initialization = self.config.get("init_lora_weights")
        name = initialization.lower() if isinstance(initialization, str) else None
        return name if name in SUBTRACTIVE_INITIALIZATIONS else None

    def names(self, target: str | list[str], module: str) -> bool:
        """Whether `target_modules` or `exclude_modules` name a module: a text is a regular expression."""
        if isinstance(target, str):
            return self.matches(target, module)
        return any(module == name or module.endswith(f".{name}") for name in target)

    def adapts(self, module: str) -> bool:
        """Whether a module gets an adapter."""
        target, excluded = self.config["target_modules"], self.config.get("exclude_modules")
        if excluded and self.names(excluded, module):
            return False
        is_named = PROJECTION.fullmatch(module) is not None if is_all_linear(target) else self.names(target, module)
        layers = self.config.get("layers_to_transform")
        if not is_named or isinstance(target, str) or layers is None or layers == []:
            return is_named
        index = self.layer(module)
        return index in layers if isinstance(layers, list) else index == layers

    def layer(self, module: str) -> int | None:
        """Return the number of a module's layer, as `layers_pattern` finds it."""
        patterns = self.config.get("layers_pattern") or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            match = self.compiled(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.").match(module)
            if match is not None:
                return int(match["index"])
        return None

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's adapter, and the factor of its update."""
        rank = self.of_pattern("rank_pattern", module, self.config.get("r", 8))
        alpha = self.of_pattern("alpha_pattern", module, self.config.get("lora_alpha", 8))
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def of_pattern(self, key: str, module: str, otherwise: Any) -> Any:
        """Return the value of the first pattern that matches the end of a module's name."""
        patterns: dict[str, Any] = self.config.get(key) or {}
        return next((value for name, value in patterns.items() if self.matches(rf"(.*\.)?({name})", module)), otherwise)

    def matches(self, expression: str, module: str) -> bool:
        """Whether a regular expression of the file matches the whole name of a module."""
        return self.compiled(expression).fullmatch(module) is not None

    def compiled(self, expression: str) -> re.Pattern[str]:
        """Return a regular expression of the file, ready to match."""
        try:
            return re.compile(expression)
        except re.error as error:
            message = f"{shown(self.file)}: {expression!r} is no regular expression: {error}"
            raise CommandError(message) from error


def is_all_linear(target: str | list[str]) -> bool:
    """Whether `target_modules` stands for every projection."""
    return isinstance(target, str) and target.lower() == "all-linear"


def plain(folder: Path, base: Path | None) -> Path:
    """Return the folder of plain adapters that compute the same: the given one, or a converted one until the exit.

    Args:
        folder: Adapters in peft's format.
        base: The folder of their model; None if it is where the adapters say.

    Raises:
        CommandError: For adapters that plain ones cannot stand for.
        ConfigError: For such adapters, if a key of their config makes them others.
    """
    settings = Settings(folder / CONFIG, training_record.read_object(folder / CONFIG))
    if _is_plain(settings):
        return folder
    model = base or Path(str(settings.config.get("base_model_name_or_path") or ""))
    if not (model / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        return folder  # what is missing is said where adapters are opened
    _check(settings)
    converted = until_exit("adapters")
    _convert(settings, folder, stored_tensors(model), converted)
    return converted


def _is_plain(settings: Settings) -> bool:
    """Whether adapters are of one rank and scale in every layer, or of another kind."""
    config = settings.config
    target = config.get("target_modules")
    if config.get("peft_type") != "LORA" or not target:
        return True
    names = target if isinstance(target, list) else []
    is_usual = is_all_linear(target) or (bool(names) and all(USUAL_TARGET.fullmatch(str(name)) for name in names))
    return (
        is_usual
        and settings.subtraction is None
        and not any(config.get(key) not in NEUTRAL_VALUES for key in MERGED_KEYS)
    )


def _check(settings: Settings) -> None:
    """Refuse adapters that differ from plain ones in more than the matrices can express."""
    neutral = settings.config | dict.fromkeys(MERGED_KEYS) | {"target_modules": "all-linear"}
    if settings.subtraction is not None:
        neutral["init_lora_weights"] = True
    _native.check_adapter_config(settings.file, neutral)
    unsupported = [module for module in OTHER_TARGETS if settings.adapts(module)]
    if unsupported:
        target = settings.config["target_modules"]
        raise CommandError(
            f"{shown(settings.file)}: `target_modules` is {target!r}, which takes in {unsupported[0]}: only "
            "projections of attention and MLP have adapters here"
        )


def _convert(settings: Settings, folder: Path, model: dict[str, StoredTensor], target: Path) -> None:
    """Write plain adapters of the highest rank that a module needs and of scale 1."""
    from safetensors.numpy import save_file

    adapter_tensors = tensors_of_file(folder / WEIGHTS)
    weights = {name.removesuffix(".weight"): tensor for name, tensor in model.items() if name.endswith(".weight")}
    projections = [module for module in weights if PROJECTION.fullmatch(module)]
    modules = [module for module in projections if settings.adapts(module)]
    if not modules:
        raise CommandError(f"{shown(settings.file)}: `target_modules` names no module of the model")
    factors = {module: _factors(settings, module, weights[module], adapter_tensors) for module in modules}
    unused = adapter_tensors.keys() - {f"{PREFIX}{module}.lora_{part}.weight" for module in modules for part in "AB"}
    if unused:
        raise CommandError(f"{shown(folder / WEIGHTS)} has {min(unused)}, a module that {CONFIG} gives no adapter")
    rank = max(down.shape[0] for down, _ in factors.values())
    names = sorted({module.rsplit(".", 1)[1] for module in modules})
    tensors = {}
    for module in projections:
        if module.rsplit(".", 1)[1] in names:
            outputs, inputs = weights[module].shape
            down, up = factors.get(module, (_zeros(0, inputs), _zeros(outputs, 0)))
            padding = rank - down.shape[0]
            tensors[f"{PREFIX}{module}.lora_A.weight"] = _concatenated(0, down, _zeros(padding, inputs))
            tensors[f"{PREFIX}{module}.lora_B.weight"] = _concatenated(1, up, _zeros(outputs, padding))
    save_file(tensors, target / WEIGHTS)
    plain_config = settings.config | dict.fromkeys(MERGED_KEYS) | {
        "target_modules": names, "r": rank, "lora_alpha": rank, "use_rslora": False, "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (target / CONFIG).write_text(json.dumps(plain_config, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja") and file.name != CONFIG:
            shutil.copyfile(file, target / file.name)


def _factors(
    settings: Settings, module: str, weight: StoredTensor, tensors: dict[str, StoredTensor]
) -> tuple[Matrix, Matrix]:
    """Return matrices A [rank, inputs] and B [outputs, rank] whose product is a module's whole update."""
    names = [f"{PREFIX}{module}.lora_{part}.weight" for part in "AB"]
    missing_name = next((name for name in names if name not in tensors), None)
    if missing_name is not None:
        raise CommandError(f"{shown(settings.file.with_name(WEIGHTS))} lacks {missing_name}, which {CONFIG} asks for")
    down, up = (tensors[name].values() for name in names)
    rank, scale = settings.rank_and_scale(module)
    outputs, inputs = weight.shape
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise CommandError(
            f"{shown(settings.file.with_name(WEIGHTS))}: the adapter of {module} has shapes {list(down.shape)} and "
            f"{list(up.shape)}, the config's has [{rank}, {inputs}] and [{outputs}, {rank}]"
        )
    up = (up * scale).astype("f4")
    if settings.subtraction is None:
        return down, up
    left, right = FACTORIZATIONS[settings.subtraction](weight.values().astype("f8"), rank)
    if settings.subtraction == "olora":
        right *= scale  # peft subtracts the scaled product; with PiSSA the matrices make up for the scale
    return _concatenated(0, down, right.astype("f4")), _concatenated(1, up, -left.astype("f4"))


def _principal_part(weight: NDArray[np.float64], rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return factors U V of the part of a weight with the largest singular values, which PiSSA subtracts.

    It is U U^T W for the leading left singular vectors U, which are eigenvectors of W W^T, the smaller Gram matrix.
    """
    import numpy as np

    if weight.shape[0] > weight.shape[1]:
        left, right = _principal_part(weight.T, rank)
        return right.T, left.T
    vectors = np.linalg.eigh(weight @ weight.T)[1][:, ::-1][:, :rank]
    return vectors, vectors.T @ weight


def _leading_part(weight: NDArray[np.float64], rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return factors U V of what OLoRA subtracts, but for the scale: Q R of the QR decomposition, cut to the rank.

    The first columns of Q are those of the decomposition of the first columns of the weight.
    """
    import numpy as np

    vectors = np.linalg.qr(weight[:, :rank])[0]
    return vectors, vectors.T @ weight


FACTORIZATIONS = {"pissa": _principal_part, "olora": _leading_part}


def _zeros(rows: int, columns: int) -> Matrix:
    import numpy as np

    return np.zeros((rows, columns), dtype=np.float32)


def _concatenated(axis: int, one: Matrix, other: Matrix) -> Matrix:
    import numpy as np

    result: Matrix = np.ascontiguousarray(np.concatenate([one, other], axis=axis))
    return result
