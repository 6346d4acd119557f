"""Training in stages on an emulated GPU: every stage as on a CPU, and resumed bit for bit across a boundary."""

from __future__ import annotations

import pytest
from cuda_emulator.runs import Runs, Tiny

TINY = Tiny(steps=5, checkpoint_every=100)
STAGES = (
    "--override",
    "stages=[{steps: 2}, {steps: 2, sequence_length: 40, batch_size: 2, learning_rate: 1.0e-3}, "
    "{steps: 1, sequence_length: 24, sequences_per_step: 3, batch_size: 1}]",
)


def train(runs: Runs, name: str, *arguments: str, device: str = "cuda") -> None:
    if not runs.workspace.run_folder(name).exists():
        runs.write(name, TINY)
    runs.train(name, *STAGES, *arguments, device=device).succeeded()


def test_every_stage_learns_what_it_learns_on_a_cpu(runs: Runs) -> None:
    train(runs, "cuda")
    train(runs, "cpu", device="cpu")
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(runs.steps("cuda"), runs.steps("cpu"), strict=True):
        assert loss == pytest.approx(expected_loss, rel=4e-3)
        assert norm == pytest.approx(expected_norm, rel=4e-2)
    stages = [(row["step"], row["stage"], row["sequence_length"]) for row in runs.metrics("cuda", "stage")]
    assert stages == [(1, 0, 16), (3, 1, 40), (5, 2, 24)]


@pytest.mark.parametrize("stop", ["1", "2", "3", "4"])
def test_a_resume_changes_no_bit_of_later_stages(runs: Runs, stop: str) -> None:
    """Also where other GEMM algorithms would be the fastest: those of all stages are chosen before the first step."""
    train(runs, "straight")
    train(runs, "resumed", "--max-steps", stop)
    train(runs.having(timing=3), "resumed", "--resume")
    assert runs.steps("resumed") == runs.steps("straight")
    assert runs.state("resumed", 5) == runs.state("straight", 5)
