"""Checks of the trainer program and of the Hub that data come from."""

from __future__ import annotations

import base64
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from orchestrator import _native, trainer_program
from orchestrator.command_error import reason
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import shown
from orchestrator.urls import redacted

HUB = "https://huggingface.co"


def trainer(program: Path | None, built: dict[str, Any], on_a_gpu: bool) -> Finding:
    """Check that the program and this package are of the same build and support the device."""
    package = built["version"] + (f" (CUDA {built['cuda']})" if built["cuda"] else "")
    facts = {"package": package, "program": str(program) if program else None}
    if program is None:
        text = f"the package {package}; no program, so that training runs in Python's process (--launch bindings)"
        return Finding("trainer", Verdict.GOOD, text, facts)
    try:
        version = trainer_program.version(program)
    except (OSError, subprocess.SubprocessError) as error:
        text = (
            f"{shown(program)} does not start: {reason(error)}. Build it again: `make build`, or `make cuda` for a GPU"
        )
        return Finding("trainer", Verdict.BAD, text, facts)
    facts["program_version"] = version
    text = f"{shown(program)} {version}, the package {package}"
    if "stand-in" in version:
        return Finding("trainer", Verdict.BAD, f"{text}: the program is one for tests; `make cuda` builds it", facts)
    if on_a_gpu and "CUDA" not in version:
        text = f"{text}: the program knows no GPUs. `make cuda` builds one that does, or take --launch bindings"
        return Finding("trainer", Verdict.BAD, text, facts)
    if version != package:
        return Finding("trainer", Verdict.REMARK, f"{text}: `make build` or `make cuda` makes both alike", facts)
    return Finding("trainer", Verdict.GOOD, text, facts)


def _without_user(url: str) -> tuple[str, str]:
    """Return a URL as it is requested, and the user and password before its host."""
    scheme, separator, rest = url.rpartition("://")
    user, _, host = rest.rpartition("@")
    return f"{scheme}{separator}{host}", user


def hub() -> Finding:
    """Check that the Hub answers."""
    url = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    endpoint, (address, user) = _native.redacted_url(url), _without_user(url)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        text = "offline, as HF_HUB_OFFLINE asks: local files and `--dataset demo` only"
        return Finding("hub", Verdict.REMARK, text, {"endpoint": endpoint, "offline": True})
    token = _native.hub_token()
    facts = {"endpoint": endpoint, "offline": False, "token": token is not None}
    try:
        request = urllib.request.Request(address, method="HEAD")
        if user:
            credentials = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
            request.add_header("Authorization", f"Basic {credentials}")
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as error:
        why = redacted(reason(getattr(error, "reason", error)))
        way = _native.hub_proxy(endpoint) or "HTTPS_PROXY or HF_ENDPOINT"
        text = f"{endpoint} does not answer ({why}): {way}, or local files and `--dataset demo`"
        return Finding("hub", Verdict.REMARK, text, facts)
    token_text = (
        f"the token {token[0]}" if token else "no token (HF_TOKEN), which gated data sets and higher limits need"
    )
    return Finding("hub", Verdict.GOOD, f"{endpoint} answers; {token_text}", facts)
