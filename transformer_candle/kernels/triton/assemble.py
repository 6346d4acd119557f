"""Assembles the checked-in PTX with the ptxas of CUDA 13.0 for every target of its family.

    assemble.py [PATTERN]        prints registers, spills and shared memory of the kernels whose file contains PATTERN

Fails if ptxas rejects a kernel, spills more than 64 bytes of its registers or serializes its wgmma instructions
(Hopper's asynchronous matmuls), or if a GPU that runs the kernel has less shared memory.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from declaration import FAMILIES, SMALL

FOLDER = Path(__file__).resolve().parent / "ptx"
# More means that a tile does not fit in the registers that its launch leaves it.
MAX_SPILLED_BYTES = 64


@dataclass(frozen=True)
class Assembled:
    """The report of ptxas on a kernel and a target; `problem` is None if it may be used."""

    file: str
    target: str
    registers: int
    spilled: int
    shared_bytes: int
    problem: str | None


@functools.cache
def ptxas() -> str:
    """Return the path of the assembler: the environment variable `PTXAS`, else the one on PATH."""
    path = os.environ.get("PTXAS") or shutil.which("ptxas")
    if path is None:
        raise FileNotFoundError(
            "no ptxas: set PTXAS to that of CUDA 13.0, which the wheel nvidia-cuda-nvcc==13.0.88 contains"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0," not in version:
        raise ValueError(f"{path} is not of CUDA 13.0")
    return path


def manifest() -> list[dict[str, Any]]:
    """Return the manifest's entries of the kernels that are checked in."""
    entries: list[dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text())["kernels"]
    return entries


def served_by(kernel: dict[str, Any], small: set[str], hopper: set[str]) -> dict[str, int]:
    """Return shared memory per block by target, of the GPUs that run this kernel instead of one of their own family."""
    limits = dict(FAMILIES[kernel["family"]].shared_bytes)
    if kernel["family"] == "sm_80" and kernel["name"] in small:
        limits = {target: bytes_ for target, bytes_ in limits.items() if target not in SMALL}
    if kernel["family"] == "sm_80" and kernel["name"] in hopper:
        limits.pop("sm_90")
    return limits


def assemble(kernel: dict[str, Any], target: str, limit: int | None) -> Assembled:
    """Run ptxas. `limit` is the shared memory of the target, None if no GPU of this target runs the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [ptxas(), "-v", f"--gpu-name={target}", FOLDER / kernel["file"], "-o", Path(folder, "out")]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return Assembled(kernel["file"], target, 0, 0, 0, process.stderr.strip())
    registers, stores, loads = (
        int(re.search(pattern, process.stderr)[1])  # type: ignore[index]
        for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    )
    spilled, shared, problem = max(stores, loads), kernel["shared_bytes"], None
    if spilled > MAX_SPILLED_BYTES:
        problem = f"{spilled} bytes of registers are spilled"
    if "wgmma.mma_async instructions are serialized" in process.stderr:
        problem = "its wgmma instructions are serialized"
    if limit is not None and shared > limit:
        problem = f"{shared} bytes of shared memory; the GPU has {limit}"
    return Assembled(kernel["file"], target, registers, spilled, shared, problem)


def assemble_all(pattern: str = "") -> Iterator[Assembled]:
    """Assemble every kernel whose file contains `pattern`, for every target of its family."""
    kernels = manifest()
    small, hopper = (
        {one["name"] for one in kernels if one["family"] == family} for family in ("sm_80_small", "sm_90a")
    )
    tasks = [
        (kernel, target, served_by(kernel, small, hopper).get(target))
        for kernel in kernels
        if pattern in kernel["file"]
        for target in FAMILIES[kernel["family"]].assembles_for
    ]
    with ThreadPoolExecutor() as pool:
        yield from pool.map(assemble, *zip(*tasks, strict=True))


def main() -> int:
    """Print one line per kernel and target."""
    failed = False
    for result in assemble_all(*sys.argv[1:]):
        report = (
            result.problem or f"{result.registers} registers, {result.spilled} spilled, {result.shared_bytes} shared"
        )
        print(f"{result.file} {result.target}: {report}", flush=True)
        failed |= result.problem is not None
    return failed


if __name__ == "__main__":
    sys.exit(main())
