"""What is checked in is what the sources give, and every card can run it."""

import subprocess
import sys
from pathlib import Path

import assemble

FOLDER = Path(assemble.__file__).parent


def test_the_sources_give_the_ptx_that_is_checked_in():
    done = subprocess.run([sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kernel_assembles_without_spilling_and_fits_its_cards():
    problems = [f"{done.file} {done.target}: {done.problem}" for done in assemble.assemble_all() if done.problem]
    assert not problems, "\n".join(problems)
