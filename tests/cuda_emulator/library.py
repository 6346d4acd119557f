"""Builds the emulated driver and says how a program is made to find it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
KERNELS = FOLDER.parents[1] / "transformer_candle" / "kernels" / "triton"
SOURCES = {
    "libcuda": "driver.c report.c memory.c stream.c copy.c graph.c module.c worker.c".split(),
    "libcublas": ["blas.c"],
    "libcublasLt": ["blas_lt.c", "gemm.c"],
    "libcurand": ["rand.c"],
}
LIBRARIES = ("libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")
WARNINGS = "-std=gnu11 -Wall -Wextra -Werror -O2 -ffp-contract=off -fPIC -fvisibility=hidden".split()
# The libraries of NVIDIA's wheels, by folder: those of CUDA 13 share one, each wheel of CUDA 12 has its own.
WHEELS: dict[int, dict[str, tuple[str, ...]]] = {
    13: {"cu13": ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")},
    12: {"cublas": ("libcublas.so.12", "libcublasLt.so.12"), "curand": ("libcurand.so.10",)},
}
VERSIONS = {13: ("-DCUBLAS=130100", "-DCURAND=100400"), 12: ("-DCUBLAS=120804", "-DCURAND=100309")}


def build(folder: Path) -> None:
    """Compile the libraries into `folder`, and a toolkit's stub of the driver into `stubs` below it."""
    for name in LIBRARIES:
        _compile(folder / name, name, SOURCES[name.partition(".")[0]], folder)
    (folder / "stubs").mkdir()
    _compile(folder / "stubs" / "libcuda.so", "libcuda.so.1", ["stub.c"], folder)


def build_wheels(environment: Path, libraries: Path, cuda: int) -> None:
    """Put the libraries of NVIDIA's wheels for CUDA 12 or 13 into an environment; `libraries` is `build`'s folder."""
    for wheel, names in WHEELS[cuda].items():
        folder = environment / "lib" / "python3.12" / "site-packages" / "nvidia" / wheel / "lib"
        folder.mkdir(parents=True)
        for name in names:
            _compile(folder / name, name, SOURCES[name.partition(".")[0]], libraries, VERSIONS[cuda])


def _compile(file: Path, soname: str, sources: Sequence[str], libraries: Path, definitions: Sequence[str] = ()) -> None:
    files = [str(FOLDER / source) for source in sources]
    using = [] if soname == "libcuda.so.1" else [f"-L{libraries}", "-l:libcuda.so.1"]
    output = ["-shared", f"-Wl,-soname,{soname}", "-o", str(file)]
    subprocess.run(["cc", *WARNINGS, *definitions, *output, *files, *using, "-pthread"], check=True)


@dataclass(frozen=True)
class Emulator:
    """An emulated GPU: its libraries, and the settings that every program run with it has."""

    libraries: Path
    python: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **settings: Any) -> Emulator:
        """Return the emulator with more settings: `memory=1 << 30` is CUDA_EMULATOR_MEMORY."""
        return Emulator(self.libraries, self.python, {**self.settings, **settings})

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a program sees this GPU."""
        own = {f"CUDA_EMULATOR_{name.upper()}": str(value) for name, value in self.settings.items()}
        library_path = os.pathsep.join(filter(None, [str(self.libraries), os.environ.get("LD_LIBRARY_PATH")]))
        return {
            "LD_LIBRARY_PATH": library_path,
            "CUDA_EMULATOR_PYTHON": self.python,
            "CUDA_EMULATOR_WORKER": str(FOLDER / "worker.py"),
            "CUDA_EMULATOR_KERNELS": str(KERNELS),
            "OMP_NUM_THREADS": "1",
            **own,
        }

    def report(self) -> dict[str, Any]:
        """Return the counters of the last program that ended, from the file that the setting `report` names."""
        counts: dict[str, Any] = json.loads(Path(self.settings["report"]).read_text())
        return counts
