"""`orchestrate doctor`: whether this machine can train on what is asked, and the way out where it cannot."""

from __future__ import annotations

import base64
import enum
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import _native
from orchestrator.launch import find_program
from orchestrator.paths import Roots, shown
from orchestrator.screen import amount

HUB = "https://huggingface.co"
LIBRARIES = ("libcuda.so", "libcublas.so", "libcublasLt.so", "libcurand.so")
CHECKPOINT_OF_1B = 15_825_985_536
_PROBE_BYTES = 8 << 20


class Verdict(str, enum.Enum):
    """What a finding means for training."""

    GOOD = "good"
    REMARK = "remark"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing, in a sentence and as values."""

    topic: str
    verdict: Verdict
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def examine(device: str, roots: Roots) -> list[Finding]:
    """Look at everything that training on `device` needs. Nothing is left behind.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        roots: Where runs would be written.
    """
    built = _native.environment()
    found = _device(device)
    checks: list[Callable[[], Finding]] = [
        lambda: _trainer(find_program(roots.target), built, on_a_card="free_bytes" in found.facts),
        lambda: _machine(built),
        lambda: _disk(roots.runs),
        _hub,
    ]
    libraries = [_libraries()] if found.facts.get("device") != "cpu" else []
    return [found, *libraries, *(check() for check in checks)]


def is_ready(findings: list[Finding]) -> bool:
    """Whether nothing is in the way of training."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings by topic."""
    topics = {
        finding.topic: {"verdict": finding.verdict.value, "text": finding.text, **finding.facts} for finding in findings
    }
    return {"ready": is_ready(findings), **topics}


def _device(asked: str) -> Finding:
    try:
        facts = _native.open_device(asked)
    except _native.TrainerError as error:
        return Finding("device", Verdict.BAD, str(error))
    if "free_bytes" not in facts:
        return Finding("device", Verdict.GOOD, facts["device"] + _why_no_card(asked), facts)
    major, minor = facts["compute_capability"]
    free, total = amount(facts["free_bytes"]), amount(facts["total_bytes"])
    text = f"{facts['device']}: {facts['name']}, compute capability {major}.{minor}, {free} of {total} free"
    software = facts["software"].removeprefix(f"{facts['name']}, ")
    return Finding("device", Verdict.GOOD, f"{text}; {software}", facts)


def _why_no_card(asked: str) -> str:
    if asked == "cpu":
        return ""
    try:
        reason = _native.cards()[0].refusal
    except _native.TrainerError as error:
        reason = str(error)
    return f"; no card, because {reason}"


def _libraries() -> Finding:
    """Name the files behind the libraries that the device's opening has loaded."""
    found: dict[str, str] = {}
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []:
        path = line.split(maxsplit=5)[-1]
        name = re.match(r"(lib\w+\.so)\b", Path(path).name)
        if name and name[1] in LIBRARIES:
            found[name[1]] = path
    loaded = {name: found[name] for name in LIBRARIES if name in found}
    if not loaded:
        return Finding("libraries", Verdict.REMARK, "none of CUDA's libraries is loaded")
    missing = [name for name in LIBRARIES if name not in loaded]
    text = ", ".join(loaded.values()) + (f"; not loaded: {', '.join(missing)}" if missing else "")
    return Finding("libraries", Verdict.REMARK if missing else Verdict.GOOD, text, {"loaded": loaded})


def _trainer(program: Path | None, built: dict[str, Any], on_a_card: bool) -> Finding:
    package = built["version"] + (f" (CUDA {built['cuda']})" if built["cuda"] else "")
    facts = {"package": package, "program": str(program) if program else None}
    if program is None:
        text = f"the package {package}; no program, so that training runs in Python's process (--launch bindings)"
        return Finding("trainer", Verdict.GOOD, text, facts)
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = f"{shown(program)} does not start: {error}. Build it again: `make build`, or `make cuda` for a card"
        return Finding("trainer", Verdict.BAD, text, facts)
    version = answer.stdout.strip().partition(" ")[2]
    facts["program_version"] = version
    text = f"{shown(program)} {version}, the package {package}"
    if "stand-in" in version:
        return Finding("trainer", Verdict.BAD, f"{text}: the program is one for tests; `make cuda` builds it", facts)
    if on_a_card and "CUDA" not in version:
        text = f"{text}: the program knows no cards. `make cuda` builds one that does, or take --launch bindings"
        return Finding("trainer", Verdict.BAD, text, facts)
    if version != package:
        return Finding("trainer", Verdict.REMARK, f"{text}: `make build` or `make cuda` makes both alike", facts)
    return Finding("trainer", Verdict.GOOD, text, facts)


def _machine(built: dict[str, Any]) -> Finding:
    memory = f"{amount(built['memory_bytes'])} of memory" if built["memory_bytes"] else "memory of unknown size"
    vectors = ", ".join(built["instructions"]) or "no vector instructions that are used"
    text = f"{built['processor'] or built['target']}, {built['cores']} cores ({vectors}), {memory}; {built['system']}"
    facts = {name: built[name] for name in ("processor", "instructions", "cores", "memory_bytes", "system")}
    return Finding("machine", Verdict.GOOD, text, facts)


def _disk(runs: Path) -> Finding:
    folder = runs.absolute()
    while not folder.exists():
        folder = folder.parent
    way_out = "name another folder in ORCHESTRATE_RUNS_ROOT or --run-dir"
    try:
        free = shutil.disk_usage(folder).free
        rate = _written_and_synced(folder)
    except OSError as error:
        text = f"cannot write below {shown(runs)}: {error.strerror}; {way_out}"
        return Finding("disk", Verdict.BAD, text, {"runs": shown(runs)})
    text = f"{shown(runs)}: {amount(free)} free, {amount(int(rate))}/s written and synced"
    facts = {"runs": shown(runs), "free_bytes": free, "bytes_per_second": rate}
    if free < 2 * CHECKPOINT_OF_1B:
        size = amount(CHECKPOINT_OF_1B)
        return Finding("disk", Verdict.REMARK, f"{text}; a checkpoint of 1.3 B parameters takes {size}", facts)
    return Finding("disk", Verdict.GOOD, text, facts)


def _written_and_synced(folder: Path) -> float:
    """Write a file as a checkpoint is written, and return bytes a second."""
    content = os.urandom(_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        file.seek(0)
        if file.read() != content:
            raise OSError(0, "what was read back is not what was written")
    return _PROBE_BYTES / seconds


def _without_user(endpoint: str) -> tuple[str, str]:
    """Return an address as messages show it, and the user and password before its host, which none shows."""
    scheme, separator, rest = endpoint.rpartition("://")
    user, _, host = rest.rpartition("@")
    return f"{scheme}{separator}{host}", user


def _hub() -> Finding:
    endpoint, user = _without_user((os.environ.get("HF_ENDPOINT") or HUB).rstrip("/"))
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        text = "offline, as HF_HUB_OFFLINE asks: local files and `--dataset demo` only"
        return Finding("hub", Verdict.REMARK, text, {"endpoint": endpoint, "offline": True})
    facts = {"endpoint": endpoint, "offline": False, "token": bool(os.environ.get("HF_TOKEN"))}
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        if user:
            credentials = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
            request.add_header("Authorization", f"Basic {credentials}")
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = f"{endpoint} does not answer ({reason}): HTTPS_PROXY or HF_ENDPOINT, or local files and `--dataset demo`"
        return Finding("hub", Verdict.REMARK, text, facts)
    token = "with HF_TOKEN" if facts["token"] else "without HF_TOKEN, which gated data sets and higher limits need"
    return Finding("hub", Verdict.GOOD, f"{endpoint} answers, {token}", facts)
