"""A finding of `orchestrate doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Verdict(str, enum.Enum):
    """What a finding means for training."""

    GOOD = "good"
    REMARK = "remark"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """What was found about a topic such as `disk`: a sentence with the way out, and the values behind it."""

    topic: str
    verdict: Verdict
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
