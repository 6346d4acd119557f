"""The wheel, as someone else would install it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from workspace import REPOSITORY, TARGET, TINY_MODEL, Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by one test process at a time: maturin moves what cargo built, and puts it back."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--profile", "dev", "--quiet", "--out", str(out)]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    with (TARGET / "maturin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=500)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_is_abi3_and_typed(wheel: Path) -> None:
    assert "-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {"orchestrator/py.typed", "orchestrator/_native.pyi"} <= set(names)
    assert any("LICENSE-MIT" in name for name in names)


def test_the_cuda_extra_installs_libraries_a_driver_lacks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = [line for line in archive.read(name).decode().splitlines() if "extra == 'cuda'" in line]
    assert {line.split()[1].split("~")[0] for line in requirements} == {
        "nvidia-cublas",
        "nvidia-curand",
        "nvidia-cuda-runtime",
    }
    assert all("sys_platform == 'linux'" in line for line in requirements)


def test_the_wheel_trains_in_a_clean_environment(wheel: Path, workspace: Workspace) -> None:
    python = workspace.root / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", workspace.root / "venv"], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, timeout=600)
    text = workspace.write_text()
    # Away from any trainer program: what is left is the extension inside the wheel.
    workspace.extra_environment |= {"PATH": "/usr/bin:/bin", "CARGO_TARGET_DIR": str(workspace.root / "none")}
    command = workspace.root / "venv" / "bin" / "orchestrate"
    flags = [*TINY_MODEL, "--input", str(text), "--steps=3", "--launch=bindings", "--experiment=wheel"]
    workspace.command(command, *flags).succeeded()
    assert len(workspace.losses("wheel")) == 3
