"""The checked-in PTX is what the sources compile to, and every GPU of its family can run it."""

import subprocess
import sys
from pathlib import Path

import assemble

FOLDER = Path(assemble.__file__).parent


def test_checked_in_ptx_matches_the_sources():
    process = subprocess.run(
        [sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_kernel_assembles_and_fits_its_gpus():
    problems = [
        f"{result.file} {result.target}: {result.problem}" for result in assemble.assemble_all() if result.problem
    ]
    assert not problems, "\n".join(problems)
