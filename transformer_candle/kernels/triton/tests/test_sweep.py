"""The sweep of tiles calls kernels as they are declared. Its timings need a GPU."""

import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
import torch

FILE = Path(interpreter.__file__).parents[3] / "benches" / "gpu" / "sweep.py"
sys.path.insert(0, str(FILE.parent))

import sweep  # noqa: E402

FAMILIES = {(8, 0): "sm_80", (8, 9): "sm_80_small", (9, 0): "sm_90a", (10, 0): "sm_80", (12, 0): "sm_80_small"}


@pytest.mark.parametrize("documents", [False, True])
def test_sweep_gives_every_kernel_its_arguments(documents):
    problem = sweep.Problem(1, 40, 2, 1, 64, documents)
    values = problem.values(torch, "cpu")
    for operation in sweep.SOURCES:
        kernel = sweep.declared(problem, operation, ["sm_80"])
        variant = sweep.Variant(32, 32, 4, 2)
        assert set(variant.constants(problem)) == set(kernel.constants)
        constants = variant.constants(problem)
        kernel.function[problem.grid(operation, constants)](
            **{name: values[name] for name in kernel.arguments}, **constants
        )
    assert values["dqkv_NP"].isfinite().all()


def test_sweep_finds_the_declared_tile_of_a_gpu():
    for capability, family in FAMILIES.items():
        problem = sweep.Problem(1, 64, 2, 1, 64)
        assert sweep.declared(problem, "attention_forward", sweep.families(capability)).family == family


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message without a GPU")
def test_sweep_without_a_gpu_exits_with_a_message():
    process = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == "sweep.py needs a GPU, and PyTorch sees none: run it where `nvidia-smi` lists one\n"
