"""Faults to inject: each hits the next `count` requests whose path matches."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal[
    "500", "502", "503",    # a server error
    "429",                  # rate limited, with Retry-After
    "rate_limit",           # rate limited, with the RateLimit headers alone
    "truncate",             # half of the body, then an orderly close
    "reset",                # half of the body, of an upload's or of the answer's, then a TCP reset
    "stall",                # half of the body, likewise, then silence until the client leaves
    "no_range",             # the whole file with status 200 for a range request
    "wrong_content_range",  # the right status with another range's header
    "short_file",           # a file that ends before the range does
    "corrupt",              # a byte flipped in each seventh of the body but the last, where a file has its footer
    "expired",              # a signed address that is no longer accepted
    "unresolved",           # a redirect to a host name that has no address
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The faults that a download survives."""
Refusal = Literal["401", "403", "409"]
"""Status codes: a token that is not accepted, one without the permission, somebody else's commit meanwhile."""


@dataclass
class Fault:
    """Lets `skip` requests pass whose path matches the regular expression `match`, then hits the next `count`."""

    match: str
    kind: Kind | Refusal
    count: int = 1
    retry_after: int = 0
    skip: int = 0


@dataclass
class Faults:
    """The faults still to come; safe to change while the hub serves. The first that matches a request has it."""

    pending: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, match: str, kind: Kind | Refusal, count: int = 1, retry_after: int = 0, skip: int = 0) -> None:
        with self.lock:
            self.pending.append(Fault(match, kind, count, retry_after, skip))

    def take(self, path: str) -> Fault | None:
        """Return the fault that hits a request for `path`, if any, and count it off."""
        with self.lock:
            for fault in self.pending:
                if fault.count > 0 and re.search(fault.match, path):
                    if fault.skip > 0:
                        fault.skip -= 1
                        return None
                    fault.count -= 1
                    return fault
        return None

    def clear(self) -> None:
        with self.lock:
            self.pending.clear()
