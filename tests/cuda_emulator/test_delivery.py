"""The program with CUDA starts anywhere: it needs no library of CUDA, and misses one only when a GPU is asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_emulator.runs import EMULATED_TRAINER
from workspace import TINY_CONFIG, Finished, Workspace

# What a system without a GPU has; libstdc++ is for Candle's kernels, which a real build contains.
USUAL = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}

GPUS = (Path("/dev/nvidia0"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


@pytest.fixture
def bare(workspace: Workspace) -> Workspace:
    """A place where no driver can be found, whatever this machine has."""
    if any(path.exists() for path in GPUS):
        pytest.skip("this machine has a driver")
    workspace.extra_environment["LD_LIBRARY_PATH"] = ""
    (workspace.root / "training.yaml").write_text(TINY_CONFIG)
    return workspace


def trained(workspace: Workspace, *arguments: str) -> Finished:
    workspace.orchestrate(
        *f"--config training.yaml --input {workspace.write_text()} --vocab-size 384 --launch none".split(),
        "--experiment=bare",
    ).succeeded()
    config = workspace.run_folder("bare") / "training.yaml"
    return workspace.command(EMULATED_TRAINER, "train", "--config", config, "--max-steps", "2", *arguments)


def test_it_names_no_library_of_cuda_as_needed() -> None:
    listing = subprocess.run(["readelf", "-d", EMULATED_TRAINER], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line}
    assert libraries
    assert libraries <= USUAL


def test_a_gpu_that_is_not_there_is_one_sentence(bare: Workspace) -> None:
    process = trained(bare, "--device", "cuda").refused(2, "cuda:0", "libcuda.so.1", "driver")
    assert len(process.err.splitlines()) == 1
    assert bare.checkpoints("bare") == []


def test_without_a_gpu_auto_trains_on_the_cpu(bare: Workspace) -> None:
    trained(bare, "--device", "auto").succeeded()
    assert len(bare.losses("bare")) == 2


def test_a_program_of_the_stand_in_compiler_says_so(bare: Workspace) -> None:
    assert "(CUDA stand-in)" in bare.command(EMULATED_TRAINER, "--version").succeeded().out
