"""The packages that some commands need beside those of every installation: the extras of the package's metadata."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from orchestrator.paths import typed


def install_command(extra: str) -> str:
    """Return the command that installs an extra's packages for this Python, in a checkout as well as elsewhere."""
    from importlib.metadata import requires

    marker = f"extra == '{extra}'"
    packages = [
        requirement.partition(";")[0].strip()
        for requirement in requires("transformer-candle") or []
        if marker in requirement
    ]
    return f"{typed(Path(sys.executable))} -m pip install {shlex.join(packages)}"
