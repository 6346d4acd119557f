"""Builds the emulated driver and says how a program is made to find it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
KERNELS = FOLDER.parents[1] / "transformer_candle" / "kernels" / "triton"
DRIVER = "driver.c report.c memory.c stream.c copy.c graph.c module.c worker.c".split()
LIBRARIES = {
    "libcuda.so.1": DRIVER,
    "libcublas.so.13": ["blas.c"],
    "libcublasLt.so.13": ["blas_lt.c", "product.c"],
    "libcurand.so.10": ["rand.c"],
}
WARNINGS = "-std=gnu11 -Wall -Wextra -Werror -O2 -ffp-contract=off -fPIC -fvisibility=hidden".split()


def build(folder: Path) -> None:
    """Compiles the libraries into `folder`."""
    for name, sources in LIBRARIES.items():
        using = [] if name == "libcuda.so.1" else [f"-L{folder}", "-l:libcuda.so.1"]
        files = [str(FOLDER / source) for source in sources]
        output = ["-shared", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(["cc", *WARNINGS, *output, *files, *using, "-pthread"], check=True)


@dataclass(frozen=True)
class Emulator:
    """An emulated card: its libraries, and the settings that every program run with it has."""

    libraries: Path
    python: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **settings: Any) -> Emulator:
        """The same with more settings: `memory=1 << 30` is CUDA_EMULATOR_MEMORY."""
        return Emulator(self.libraries, self.python, {**self.settings, **settings})

    def environment(self) -> dict[str, str]:
        """What a program needs to see this card."""
        own = {f"CUDA_EMULATOR_{name.upper()}": str(value) for name, value in self.settings.items()}
        found = os.pathsep.join(filter(None, [str(self.libraries), os.environ.get("LD_LIBRARY_PATH")]))
        return {
            "LD_LIBRARY_PATH": found,
            "CUDA_EMULATOR_PYTHON": self.python,
            "CUDA_EMULATOR_WORKER": str(FOLDER / "worker.py"),
            "CUDA_EMULATOR_KERNELS": str(KERNELS),
            "OMP_NUM_THREADS": "1",
            **own,
        }

    def report(self) -> dict[str, Any]:
        """What the last program that ended counted, if `report` names a file."""
        counts: dict[str, Any] = json.loads(Path(self.settings["report"]).read_text())
        return counts
