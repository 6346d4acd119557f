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


def train(runs: Runs, package: Path, name: str, *words: str, **variables: str) -> Finished:
    """Train a run that was written, in two processes of torchrun, with further environment variables."""
    config = runs.workspace.run_folder(name) / "training.json"
    environment: Mapping[str, str] = {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **variables}
    options = ("--config", str(config), "--device", "cuda", *words)
    return runs._with(environment).command(*TORCHRUN, "--nproc-per-node=2", RANK, *options)


def state(runs: Runs, name: str, step: int) -> dict[str, np.ndarray]:
    """Return weights and the optimizer's state, whatever files they are in."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(runs.checkpoint(name, step).glob("*.safetensors")):
        tensors |= {key: value.float().numpy() for key, value in load_file(file).items()}
    return tensors


def assert_near(one: dict[str, np.ndarray], other: dict[str, np.ndarray], bound: float) -> None:
    assert one.keys() == other.keys()
    far = {key: float(np.abs(one[key] - other[key]).max()) for key in one}
    assert max(far.values()) <= bound, far


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_two_gpus_train_as_one_does(two_gpus: Runs, package: Path, algorithm: str) -> None:
    tiny = replace(TINY, algorithm=algorithm)
    two_gpus.trained("one", tiny)
    two_gpus.write("two", tiny)
    process = train(two_gpus, package, "two").succeeded()
    assert "in 2 ranks" in process.out, process.out
    assert two_gpus.steps("two") == [pytest.approx(row, rel=1e-6) for row in two_gpus.steps("one")]
    assert_near(state(two_gpus, "two", 4), state(two_gpus, "one", 4), 1e-6)
    parts = sorted(file.name for file in two_gpus.checkpoint("two", 4).glob("optimizer*"))
    assert parts == ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]


def test_blocks_exchange_gradients_during_the_backward_pass(two_gpus: Runs, package: Path) -> None:
    """The model's blocks are large enough for that: each part of the last micro-batch is a CUDA graph."""
    large = replace(TINY, hidden=256, heads=4, intermediate=768, layers=4, accumulation=2, steps=3, checkpoint_every=3)
    two_gpus.trained("one", large)
    two_gpus.write("two", large)
    swaps = two_gpus.workspace.root / "swaps"
    train(two_gpus, package, "two", SWAPS=str(swaps)).succeeded()
    assert two_gpus.steps("two") == [pytest.approx(row, rel=1e-6) for row in two_gpus.steps("one")]
    # AdamW divides a rounded gradient by its own size: up to some thousandths of a step's 1e-3.
    assert_near(state(two_gpus, "two", 3), state(two_gpus, "one", 3), 1e-5)
    lines = swaps.read_text().splitlines()
    assert len(lines) >= 2 * 4 * 3, "two ranks, warm-up and 3 steps: gradients in two parts at least, then weights"


def test_a_checkpoint_is_resumed_on_one_and_on_two_gpus(two_gpus: Runs, package: Path) -> None:
    tiny = replace(TINY, precision="bf16")
    two_gpus.write("straight", tiny)
    two_gpus.write("stopped", tiny)
    train(two_gpus, package, "straight").succeeded()
    train(two_gpus, package, "stopped", "--max-steps=2").succeeded()
    shutil.copytree(two_gpus.workspace.run_folder("stopped"), two_gpus.workspace.run_folder("alone"))
    train(two_gpus, package, "stopped", "--resume").succeeded()
    assert two_gpus.steps("stopped") == two_gpus.steps("straight")
    assert_near(state(two_gpus, "stopped", 4), state(two_gpus, "straight", 4), 0)
    two_gpus.train("alone", "--resume").succeeded()
    assert two_gpus.steps("alone")[2][1] == pytest.approx(two_gpus.steps("straight")[2][1], rel=1e-6)
    assert two_gpus.steps("alone") == [pytest.approx(row, rel=1e-2) for row in two_gpus.steps("straight")]


@pytest.mark.parametrize(("precision", "algorithm"), [("fp32", "adamw"), ("bf16", "muon")])
def test_virtual_shards_give_the_bits_of_one_gpu(two_gpus: Runs, package: Path, precision: str, algorithm: str) -> None:
    """The second rank takes the GEMM algorithms of the first, though others would be the fastest there.

    With four layers each rank updates matrices of every shape, so that the first one chooses for all of them.
    """
    key = "--override=runtime.deterministic_reduction=4"
    for name in ("one", "two"):
        two_gpus.write(name, replace(TINY, layers=4, precision=precision, algorithm=algorithm))
    two_gpus.train("one", key).succeeded()
    train(two_gpus, package, "two", key).succeeded()
    assert two_gpus.steps("two") == two_gpus.steps("one")
    assert_near(state(two_gpus, "two", 4), state(two_gpus, "one", 4), 0)
    assert two_gpus.trainer_state("two", 4) == two_gpus.trainer_state("one", 4)


def test_what_gpus_lack_is_refused_in_a_sentence(two_gpus: Runs, package: Path) -> None:
    """The ranks run `orchestrator.distributed` itself, which asks for NCCL, and no emulated exchange."""
    two_gpus.write("run", TINY)
    config = two_gpus.workspace.run_folder("run") / "training.json"
    command = (sys.executable, "-m", "orchestrator.distributed.launcher", "2", f"--config={config}", "--device=cuda")
    for runs, message in (
        (two_gpus, "GPUs, and this rank trains on cuda:"),
        (two_gpus.having(gpus=1), "2 ranks on this machine need a GPU each, and this process sees cuda:0 ("),
    ):
        process = runs._with({"PYTHONPATH": str(package)}).command(*command).refused(2, message)
        assert process.err.count("orchestrate: ") == 1, process.err
    assert not (config.parent / "metrics.jsonl").exists()
