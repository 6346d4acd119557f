"""docs/decisions/026 against what `plan --ranks` says."""

from __future__ import annotations

import pytest
import scaling
from scaling import MODELS, Machines
from workspace import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "decisions" / "026-scaling-on-paper.md"


@pytest.mark.parametrize("model", MODELS)
def test_the_document_quotes_the_plans(model: str) -> None:
    assert scaling.table(model) in DOCUMENT.read_text(), "run benches/gpu/scaling.py"


def test_3_billion_parameters_fit_on_four_gpus_of_32_gb() -> None:
    alone, four = (scaling.planned("3b", Machines("rtx5090", ranks)) for ranks in (1, 4))
    assert alone["shortage"] is not None
    assert four["shortage"] is None
    assert four["ranks"] == 4
    assert four["speed"]["exchange"]["bytes_per_rank"] == pytest.approx(0.75 * 6 * four["parameters"], rel=1e-4)
