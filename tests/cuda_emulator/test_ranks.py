"""Training in two processes, each on an emulated GPU of its own: the numbers of one process, and what is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator.runs import Runs, Tiny
from safetensors.torch import load_file
from workspace import REPOSITORY, TARGET, Finished

EXTENSION = TARGET / "cuda-emulated" / "debug" / "lib_native.so"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
RANK = Path(__file__).with_name("emulated_rank.py")
TINY = Tiny(hidden=64, heads=2, kv_heads=1, layers=2, accumulation=4, precision="fp32")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package with the extension that has CUDA, as an entry of PYTHONPATH."""
    assert EXTENSION.exists(), f"{EXTENSION} is missing: make cuda-emulated"
    folder = tmp_path / "package" / "orchestrator"
    folder.mkdir(parents=True)
    for path in (REPOSITORY / "python" / "orchestrator").iterdir():
        if not path.name.startswith(("_native.", "__pycache__")):
            (folder / path.name).symlink_to(path)
    (folder / "_native.abi3.so").symlink_to(EXTENSION)
    return folder.parent


@pytest.fixture
def two_gpus(runs: Runs, tmp_path: Path) -> Runs:
    """Two GPUs whose libraries are found beside those of PyTorch: under the names of a toolkit."""
    folder = shutil.copytree(runs.emulator.libraries, tmp_path / "libraries")
    for library in ("libcublasLt", "libcublas", "libcurand"):
        (version,) = folder.glob(f"{library}.so.*")
        shutil.copy(version, folder / f"{library}.so")
    return replace(runs, emulator=replace(runs.emulator, libraries=folder)).having(gpus=2)


def train(
    runs: Runs, package: Path, name: str, *words: str, ranks: int = 2, rank: tuple[str, ...] | None = None
) -> Finished:
    """Trains a run that was written in processes of torchrun."""
    config = runs.workspace.run_folder(name) / "training.json"
    environment: Mapping[str, str] = {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    program = rank or (str(RANK),)
    command = (*TORCHRUN, f"--nproc-per-node={ranks}", *program, "--config", config, "--device", "cuda", *words)
    return runs._with(environment).command(*command)


def state(runs: Runs, name: str, step: int) -> dict[str, np.ndarray]:
    """Weights and the optimizer's state, whatever files they are in."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(runs.checkpoint(name, step).glob("*.safetensors")):
        found |= {key: value.float().numpy() for key, value in load_file(file).items()}
    return found


def assert_near(one: dict[str, np.ndarray], other: dict[str, np.ndarray], bound: float) -> None:
    assert one.keys() == other.keys()
    far = {key: float(np.abs(one[key] - other[key]).max()) for key in one}
    assert max(far.values()) <= bound, far


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_two_gpus_train_as_one_does(two_gpus: Runs, package: Path, algorithm: str) -> None:
    tiny = replace(TINY, algorithm=algorithm)
    two_gpus.trained("one", tiny)
    two_gpus.write("two", tiny)
    done = train(two_gpus, package, "two").succeeded()
    assert "in 2 ranks" in done.out, done.out
    assert two_gpus.steps("two") == [pytest.approx(row, rel=1e-6) for row in two_gpus.steps("one")]
    assert_near(state(two_gpus, "two", 4), state(two_gpus, "one", 4), 1e-6)
    parts = sorted(file.name for file in two_gpus.checkpoint("two", 4).glob("optimizer*"))
    assert parts == ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]
