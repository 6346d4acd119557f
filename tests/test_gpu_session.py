"""The measuring session on a card, with programs that stand in for the trainer and PyTorch."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from workspace import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benches" / "gpu"))

import session

SESSION = REPOSITORY / "benches" / "gpu" / "session.py"
TRAINER = """#!/bin/sh
case "$*" in
  *memory_limit*) echo '{"tokens_per_second": 300.0, "mfu": 0.6, "memory_bytes": 30000000000}' ;;
  *) echo 'error: out of everything' >&2; exit 4 ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
  -c*) ;;
  *eager*) echo 'no such kernel' ;;
  *) echo '{"micro_batch": 1}'; echo '{"tokens_per_second": 200.0, "mfu": 0.4, "micro_batch": 1}' ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_part_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    hanging = script(tmp_path / "hanging", "#!/bin/sh\necho row 1\nsleep 100 &\nsleep 100\n")
    begin = time.monotonic()
    outcome = session.run(session.Part("hangs", [str(hanging)], 60), 0.5, dict(os.environ), tmp_path / "log.txt")
    assert time.monotonic() - begin < 10
    assert outcome.failure == "stopped after 0 s: row 1"
    assert outcome.result == {}


def test_the_table_compares_rounds_and_names_what_failed(tmp_path: Path) -> None:
    program, python = tmp_path / "transformer-candle.gz", script(tmp_path / "python", PYTHON)
    program.write_bytes(gzip.compress(TRAINER.encode()))
    only = ("ours, capped", "torch.compile, capped", "ours", "torch eager")
    words = [word for part in only for word in ("--only", part)]
    command: list[str | Path] = [
        sys.executable,
        SESSION,
        "--program",
        program,
        "--python",
        python,
        "--out",
        tmp_path,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "ours / torch.compile, capped: 1.500 (rounds: 2)" in done.stdout
    assert "exit code 4: error: out of everything" in done.stdout
    assert "printed no result" in done.stdout
    assert "60.0%" in done.stdout
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [part["part"] for part in saved["parts"]] == [*only[:3], "torch eager", *only[:3]]
