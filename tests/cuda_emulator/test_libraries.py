"""Which of CUDA's libraries the program takes, and what it says of those that it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cuda_emulator.library import Emulator, build_wheels
from cuda_emulator.runs import Runs, Tiny
from orchestrator.extras import install_command

TINY = Tiny(steps=2, checkpoint_every=2)


@pytest.fixture
def driver(runs: Runs, tmp_path: Path) -> Runs:
    """A machine that has the driver where the loader finds it, and none of CUDA's other libraries."""
    folder = tmp_path / "driver"
    folder.mkdir()
    shutil.copy(runs.emulator.libraries / "libcuda.so.1", folder)
    runs.write("run", TINY)
    return Runs(runs.workspace, Emulator(folder, runs.emulator.python, runs.emulator.settings))


def wheels(runs: Runs, emulator: Emulator, *cudas: int, folder: str = "venv") -> Path:
    """Make a Python environment with NVIDIA's wheels of CUDA 12, 13 or both."""
    environment = runs.workspace.root / folder
    for cuda in cudas:
        build_wheels(environment, emulator.libraries, cuda)
    return environment


def software(runs: Runs) -> str:
    """Return the versions that the run was trained with."""
    text = (runs.workspace.run_folder("run") / "environment.json").read_text()
    return str(json.loads(text)["card"]["fingerprint"])


@pytest.mark.parametrize("kind", ["by its folder", "by its answer", "as libcuda.so.1"])
def test_a_toolkits_stub_is_not_taken_for_the_driver(runs: Runs, tmp_path: Path, kind: str) -> None:
    libraries = runs.emulator.libraries
    folder = tmp_path / "toolkit" / ("lib" if kind == "by its answer" else "stubs")
    folder.mkdir(parents=True)
    stub = folder / ("libcuda.so.1" if kind == "as libcuda.so.1" else "libcuda.so")
    # libcuda.so.1 stands for the stub of an old toolkit, which does not say that it is one.
    shutil.copy(libraries / "libcuda.so.1" if kind == "by its folder" else libraries / "stubs" / "libcuda.so", stub)
    runs.write("run", TINY)
    environment = {"LD_LIBRARY_PATH": f"{folder}:{libraries}"}
    process = runs.train("run", environment=environment).refused(2, "stub", str(stub), "LD_LIBRARY_PATH")
    assert len(process.err.strip().splitlines()) == 1
    runs.train("run", device="auto", environment=environment).succeeded()


def test_a_stub_in_a_toolkits_folder_is_passed_over(driver: Runs, emulator: Emulator, tmp_path: Path) -> None:
    for name in ("stub", "real"):
        (tmp_path / name / "lib64").mkdir(parents=True)
    shutil.copy(emulator.libraries / "stubs" / "libcuda.so", tmp_path / "stub" / "lib64" / "libcuda.so.1")
    toolkits = {"LD_LIBRARY_PATH": "", "CUDA_HOME": str(tmp_path / "stub"), "CUDA_PATH": str(tmp_path / "real")}
    driver.train("run", environment=toolkits).refused(2, "stub", "install a driver of the line 580 or newer")
    for library in emulator.libraries.glob("lib*"):
        shutil.copy(library, tmp_path / "real" / "lib64")
    driver.train("run", environment=toolkits).succeeded()


@pytest.mark.parametrize(("version", "expected"), [(12080, "cuBLASLt 120804"), (13000, "cuBLASLt 130100")])
def test_the_wheels_that_the_driver_starts_are_taken(
    driver: Runs, emulator: Emulator, version: int, expected: str
) -> None:
    both_wheels = {"VIRTUAL_ENV": str(wheels(driver, emulator, 12, 13))}
    driver.having(driver=version).train("run", environment=both_wheels).succeeded()
    assert expected in software(driver)


def test_wheels_above_the_driver_alone_are_refused(driver: Runs, emulator: Emulator) -> None:
    new = {"VIRTUAL_ENV": str(wheels(driver, emulator, 13))}
    older = driver.having(driver=12090)
    older.train("run", environment=new).refused(
        2, "libcublasLt.so.13", "cuBLAS 13 needs", "for CUDA 12.9", "nvidia-cublas-cu12"
    )


def test_a_library_that_does_not_load_is_named_with_the_way_out(driver: Runs, emulator: Emulator) -> None:
    environment = wheels(driver, emulator, 13)
    broken = environment / "lib/python3.12/site-packages/nvidia/cu13/lib/libcurand.so.10"
    broken.write_bytes(b"no library")
    phrases = (str(broken), "cannot be used", install_command("cuda").partition(" -m ")[2])
    driver.train("run", environment={"VIRTUAL_ENV": str(environment)}).refused(2, *phrases)


def test_wheels_of_the_user_are_found_without_python(driver: Runs, emulator: Emulator) -> None:
    driver.train("run").refused(2, "libcublasLt.so was not found")
    wheels(driver, emulator, 13, folder="home/.local")
    driver.train("run", environment={"HOME": str(driver.workspace.root / "home")}).succeeded()


@pytest.mark.parametrize("capability", ["10.0", "12.0"])
def test_a_cublas_that_does_not_know_blackwell_is_refused(runs: Runs, capability: str) -> None:
    runs.write("run", TINY)
    old = runs.having(gpu="NVIDIA B200", capability=capability, cublas=120602)
    why = f"NVIDIA B200 has compute capability {capability}, which cuBLAS 12.6 does not know"
    old.train("run").refused(2, why, "pip install")
    process = old.train("run", device="auto").succeeded()
    assert f"on the CPU: {why}" in process.out + process.err
