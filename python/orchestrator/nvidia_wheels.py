"""Passes the folder of NVIDIA's wheels to the trainer, which opens CUDA's libraries by itself."""

from __future__ import annotations

import importlib.util
import os

VARIABLE = "ORCHESTRATE_NVIDIA_WHEELS"


def make_known() -> None:
    """Set an environment variable to the folders of the package `nvidia`; the extension and the program read it."""
    package = importlib.util.find_spec("nvidia")
    if package is not None and package.submodule_search_locations:
        os.environ.setdefault(VARIABLE, os.pathsep.join(package.submodule_search_locations))
