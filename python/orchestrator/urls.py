"""URLs as messages show them: without user, password, signature and key."""

from __future__ import annotations

import os
import re

from orchestrator import _native

URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>`]+", re.IGNORECASE)
VARIABLES = ("HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
"""Variables whose values are URLs. A password in them may hold any character."""


def redacted(text: str) -> str:
    """Return the text with every URL in it as messages show it."""
    for variable in VARIABLES:
        for value in (os.environ.get(variable), os.environ.get(variable.lower())):
            if value:
                text = text.replace(value.rstrip("/"), _native.redacted_url(value.rstrip("/")))
    return URL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    url = match[0].rstrip(".,;:!?)]}")
    return _native.redacted_url(url) + match[0][len(url) :]
