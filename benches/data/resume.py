"""Resuming in the middle of an epoch: whether the same batches follow, and how long until they do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import run_worker

WAYS = (("ours", "resume"), ("datasets-stateful", "resume"), ("datasets", "skip"))
"""Contender and task: by our state; by StatefulDataLoader's and `datasets`' `state_dict`; by reading up to there."""


def resume(root: Path, batches: int) -> Iterator[dict[str, Any]]:
    """Yield a row per way to resume after `batches` batches."""
    with tempfile.TemporaryDirectory() as folder:
        for contender, way in WAYS:
            options = {"batches": batches, "state": Path(folder) / f"{contender}.state"}
            before = run_worker(contender, "depart", root, options=options)
            del before["peak_mebibytes"]
            after = run_worker(contender, way, root, options=options)
            equal = sum(a == b for a, b in zip(before["digests"], after["digests"], strict=False))
            yield {
                "contender": contender, "way": way, "batches_before": batches,
                "equal_batches": f"{equal} of {len(before.pop('digests'))}",
                **{name: value for name, value in after.items() if name != "digests"}, **before,
            }  # fmt: skip
