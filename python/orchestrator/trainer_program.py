"""The trainer's program: where it is, and which build."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NAME = "transformer-candle"
# Files of the driver on Linux and in WSL.
GPU_FILES = (Path("/dev/nvidia0"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def find(target: Path | None) -> Path | None:
    """Return the trainer: the newest build of this checkout, else the one beside this package or on the PATH.

    On a machine with a GPU a build with CUDA takes precedence over a newer one without.

    Args:
        target: Cargo's target directory; None for that of the checkout.
    """
    checkout = Path(__file__).resolve().parents[2]
    folders = [target] if target else []
    if (checkout / "Cargo.toml").is_file():
        folders.append(checkout / "target")
    for folder in folders:
        for_gpus = _executable([folder / "cuda" / "release" / NAME])
        built = _executable([folder / profile / NAME for profile in ("release", "debug")])
        candidates = for_gpus if for_gpus and has_nvidia_driver() else for_gpus + built
        if candidates:
            return max(candidates, key=lambda path: path.stat().st_mtime)
    neighbour = Path(__file__).parent / NAME
    if os.access(neighbour, os.X_OK):
        return neighbour
    program = shutil.which(NAME)
    return Path(program) if program else None


def version(program: Path) -> str:
    """Return what `--version` says after the program's name; with `(CUDA ...)` where it was built with CUDA.

    Raises:
        OSError, subprocess.SubprocessError: It does not start, fails, or takes longer than 30 s.
    """
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    return answer.stdout.strip().partition(" ")[2]


def has_nvidia_driver() -> bool:
    """Whether the system has an NVIDIA GPU, independent of this build."""
    return any(path.exists() for path in GPU_FILES)


def _executable(paths: list[Path]) -> list[Path]:
    return [path for path in paths if os.access(path, os.X_OK)]
