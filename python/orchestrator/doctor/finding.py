"""A finding of `orchestrate doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Verdict(str, enum.Enum):
    """The severity of a finding: in order, worth improving, or something that prevents training."""

    GOOD = "good"
    REMARK = "remark"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """The result of a check on a topic such as `disk`: a sentence with the way out, and the values behind it."""

    topic: str
    verdict: Verdict
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
