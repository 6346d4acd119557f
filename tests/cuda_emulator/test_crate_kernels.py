"""The tests of crate kernels that need a GPU, on the emulated one."""

from __future__ import annotations

import os
import subprocess

import pytest
from cuda_emulator.library import Emulator
from workspace import REPOSITORY, TARGET

# As `make cuda-emulated` builds: in the same folder and with the packages that it selects, because the features of
# shared dependencies follow from the selection. With `kernels` alone Candle and most of what it uses would be compiled
# again.
BUILD = (
    'environment="$(tools/cuda/stand_in.sh "$CARGO_TARGET_DIR/libraries")" && eval "$environment" && '
    "cargo test --quiet --locked -p kernels -p cli -p training --features cuda --test {} -- --ignored --test-threads=1"
)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tests", ["runtime_on_a_gpu", "matmul_on_a_gpu"])
def test_what_needs_a_gpu_passes_on_the_emulated_one(emulator: Emulator, tests: str) -> None:
    folders = {"CARGO_BUILD_BUILD_DIR": str(TARGET), "CARGO_TARGET_DIR": str(TARGET / "cuda-emulated")}
    environment = {**os.environ, **folders, **emulator.environment()}
    process = subprocess.run(
        ["bash", "-c", BUILD.format(tests)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert " passed" in process.stdout
    assert " 0 passed" not in process.stdout
