"""Whether there is a GPU to train on, and whether the build that trains would find it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from orchestrator import _native, trainer_program
from orchestrator.command_error import CommandError, reason
from orchestrator.paths import shown
from orchestrator.screen import note


def usable(device: str) -> _native.Gpu | None:
    """Return the GPU that this package would use for a device; None for the CPU. None is opened.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: A GPU was asked for and is not there, with the reason.
    """
    if device == "cpu":
        return None
    try:
        gpus_by_name = {f"cuda:{gpu.ordinal}": gpu for gpu in _native.gpus()}
    except _native.ConfigError as error:
        if device != "auto":
            raise _native.ConfigError(f"the device asked for is {device}: {error}") from error
        if trainer_program.has_nvidia_driver():
            note(f"Not using a GPU: {error}")
        return None
    gpu = gpus_by_name.get("cuda:0" if device in ("auto", "cuda") else device)
    if gpu is not None and gpu.refusal is None:
        return gpu
    if device != "auto":
        _native.open_device(device)  # raises with the device and the reason
    if gpu is not None:
        note(f"Not using a GPU: {gpu.refusal}")
    return None


def require(device: str, program: Path | None) -> None:
    """Refuse a GPU that was asked for and that training would not find.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        program: The program that trains; None where this package does.

    Raises:
        CommandError, ConfigError: A GPU was asked for; what is missing, and what to do.
    """
    if device in ("auto", "cpu"):
        return
    if program is not None:
        try:
            version = trainer_program.version(program)
        except (OSError, subprocess.SubprocessError) as error:
            raise CommandError(
                f"{shown(program)} does not start: {reason(error)}. Build it again: `make cuda`"
            ) from error
        if "CUDA" not in version:
            raise CommandError(
                f"the device asked for is {device}: {shown(program)} was built without CUDA, which `make cuda` adds"
            )
        if _native.environment()["cuda"] is None:
            return  # The program can see GPUs that this package cannot.
    usable(device)
