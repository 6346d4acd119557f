"""The device that would be trained on, and the libraries behind it."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator import _native
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.screen import amount

LIBRARIES = ("libcuda.so", "libcublas.so", "libcublasLt.so", "libcurand.so")


def device(name: str) -> Finding:
    """Open what `auto`, `cpu`, `cuda` or `cuda:N` means here."""
    try:
        facts = _native.open_device(name)
    except _native.TrainerError as error:
        return Finding("device", Verdict.BAD, str(error))
    if "free_bytes" not in facts:
        return Finding("device", Verdict.GOOD, facts["device"] + _why_no_gpu(name), facts)
    major, minor = facts["compute_capability"]
    free, total = amount(facts["free_bytes"]), amount(facts["total_bytes"])
    text = f"{facts['device']}: {facts['name']}, compute capability {major}.{minor}, {free} of {total} free"
    software = facts["software"].removeprefix(f"{facts['name']}, ")
    return Finding("device", Verdict.GOOD, f"{text}; {software}", facts)


def _why_no_gpu(name: str) -> str:
    if name == "cpu":
        return ""
    try:
        reason = _native.gpus()[0].refusal
    except _native.TrainerError as error:
        reason = str(error)
    return f"; no GPU, because {reason}"


def libraries() -> Finding:
    """Name the files behind the libraries that the device's opening has loaded."""
    paths: dict[str, str] = {}
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []:
        path = line.split(maxsplit=5)[-1]
        name = re.match(r"(lib\w+\.so)\b", Path(path).name)
        if name and name[1] in LIBRARIES:
            paths[name[1]] = path
    loaded = {name: paths[name] for name in LIBRARIES if name in paths}
    if not loaded:
        return Finding("libraries", Verdict.REMARK, "none of CUDA's libraries is loaded")
    missing_libraries = [name for name in LIBRARIES if name not in loaded]
    text = ", ".join(loaded.values()) + (f"; not loaded: {', '.join(missing_libraries)}" if missing_libraries else "")
    return Finding("libraries", Verdict.REMARK if missing_libraries else Verdict.GOOD, text, {"loaded": loaded})
