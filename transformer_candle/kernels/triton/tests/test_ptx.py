"""The checked-in PTX is what the sources compile to, and every GPU of its family can run it."""

import subprocess
import sys
from pathlib import Path

import assemble

FOLDER = Path(assemble.__file__).parent


def test_checked_in_ptx_matches_the_sources():
    done = subprocess.run([sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kernel_assembles_and_fits_its_gpus():
    problems = [f"{done.file} {done.target}: {done.problem}" for done in assemble.assemble_all() if done.problem]
    assert not problems, "\n".join(problems)
