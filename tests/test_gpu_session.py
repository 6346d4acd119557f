"""The benchmark session on a GPU, with fake programs in place of the trainer and PyTorch."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import session
from workspace import REPOSITORY

SESSION = REPOSITORY / "benches" / "gpu" / "session.py"
CAPPED = {
    "tokens_per_second": 300.0,
    "tokens_per_step": 600,
    "mfu": 0.6,
    "memory_bytes": 30_000_000_000,
    "nominal_flops_per_second": 209.5e12,
}
FAILED = {"check": "model bf16: qkv", "failure": "NaN is more than 1.0e-3"}
GRADIENTS = {"part": "gradients", "passed": False, "rows": [{"check": "model bf16: down", "failure": None}, FAILED]}
TRAINER = """#!/bin/sh
case "$*" in
  *"--only gradients"*) echo 'a row' >&2; echo "$GRADIENTS"; exit 1 ;;
  gpu-check*) echo '{"part": "any", "passed": true, "rows": []}' ;;
  *memory_limit*) echo "$CAPPED" ;;
  *) echo 'error: out of everything' >&2; exit 4 ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
  -c*) echo '[]' ;;
  *eager*) echo 'no such kernel' ;;
  *) echo '{"micro_batch": 1}'; echo '{"tokens_per_second": 200.0, "mfu": 0.4, "micro_batch": 1}' ;;
esac
"""
SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo '{"part": "gradients", "passed": true, "rows": []}'
echo "========= ERROR SUMMARY: 2 errors"
exit 86
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def session_of(folder: Path, *options: str, only: tuple[str, ...] = (), path: str = "") -> tuple[str, dict[str, Any]]:
    """Run a session with the programs above; return the table and the content of results.json."""
    program, python = folder / "transformer-candle.gz", script(folder / "python", PYTHON)
    program.write_bytes(gzip.compress(TRAINER.encode()))
    words = [word for part in only for word in ("--only", part)]
    paths = ["--program", str(program), "--python", str(python), "--out", str(folder)]
    command = [sys.executable, str(SESSION), *paths, *options, *words]
    answers = {"CAPPED": json.dumps(CAPPED), "GRADIENTS": json.dumps(GRADIENTS)}
    environment = {**os.environ, "PATH": f"{path}{os.environ['PATH']}", **answers}
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return process.stdout, json.loads((folder / "results.json").read_text())


def commands(folder: Path) -> list[str]:
    return [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("$ ")]


def test_a_hanging_part_is_killed_with_its_children(tmp_path: Path) -> None:
    hanging = script(tmp_path / "hanging", "#!/bin/sh\necho row 1\nsleep 100 &\nsleep 100\n")
    part = session.Part("hangs", [str(hanging)], session.Duration(0.5), session.Duration(0))
    begin = time.monotonic()
    outcome = session.run(part, session.Measured(), 60, dict(os.environ), tmp_path / "log.txt")
    assert time.monotonic() - begin < 10
    assert outcome.failure == "stopped after 0 s: row 1"
    assert outcome.result == {}


def test_the_table_compares_rounds_and_names_failures(tmp_path: Path) -> None:
    only = ("ours, capped", "torch.compile, capped", "ours", "torch eager")
    table, results = session_of(tmp_path, only=only)
    assert "ours / torch.compile, capped: 1.500 (rounds: 2)" in table
    assert "exit code 4: error: out of everything" in table
    assert "printed no result" in table
    assert "60.0%" in table
    assert [part["part"] for part in results["parts"]] == [*only[:3], "torch eager", *only[:3]]


def test_every_part_requires_a_gpu(tmp_path: Path) -> None:
    """If a library is missing, no part may benchmark the CPU for minutes."""
    session_of(tmp_path)
    part_commands = commands(tmp_path)
    assert len(part_commands) > 10
    assert [command for command in part_commands if "--device cuda" not in command] == []


def test_skipped_parts_are_in_the_results(tmp_path: Path) -> None:
    _, results = session_of(tmp_path, "--seconds", "5")
    assert len(results["parts"]) == 14
    assert all("no time left" in part["failure"] for part in results["parts"])
    assert not (tmp_path / "log.txt").exists(), "nothing was run"


def test_parts_are_sized_by_the_measured_step(tmp_path: Path) -> None:
    session_of(tmp_path, "--seconds", "2000", only=("ours, capped", "torch.compile, capped"))
    seconds = [float(command.split("--seconds ")[1].split()[0]) for command in commands(tmp_path)]
    start, compiling, assumed, measured = (
        session.START_SECONDS,
        session.COMPILE_SECONDS,
        session.ASSUMED_STEP_SECONDS,
        2.0,
    )
    assert seconds[0] == start + 9 * assumed
    assert seconds[1] == start + 2 * compiling + 8 * measured, "room to compile twice"
    assert seconds[2] == start + 9 * measured
    assert "--peak 209500000000000" in commands(tmp_path)[1], "PyTorch's MFU has our peak"


def test_our_bench_has_time_for_its_steps_on_every_gpu() -> None:
    """The steps are those of a 5090, an A100 and an H200; the time limit ends after the budget."""
    [ours] = session.measurements("program", "python", Path("c.yaml"), ["ours"])[:1]
    for step in (6.6, 7.0, 1.9):
        fitted = session.fit_to_budget(ours, session.Measured(step=step), 400)
        assert fitted is not None
        command, limit = fitted
        budget = float(command[-1])
        assert budget >= session.START_SECONDS + 9 * step - 1
        assert limit >= budget + step
    assert session.fit_to_budget(ours, session.Measured(step=6.6), 45) is None


def test_gpu_check_runs_part_by_part(tmp_path: Path) -> None:
    table, results = session_of(tmp_path, only=("gpu-check",))
    names = ["training", "gradients", "operations", "memory"]
    assert [part["part"] for part in results["parts"]][:4] == [f"gpu-check {name}" for name in names]
    assert [part["result"].get("passed") for part in results["parts"]][:4] == [True, False, True, True]
    assert "exit code 1: model bf16: qkv: NaN is more than 1.0e-3" in table


def test_failed_checks_are_repeated_under_the_sanitizer(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    script(tools / "compute-sanitizer", SANITIZER)
    table, results = session_of(tmp_path, only=("gpu-check",), path=f"{tools}{os.pathsep}")
    assert results["parts"][4]["part"] == "compute-sanitizer"
    assert "exit code 86: ========= ERROR SUMMARY: 2 errors" in table
    last = commands(tmp_path)[-1]
    assert last.startswith(f"$ {tools}/compute-sanitizer --error-exitcode 86 ")
    assert last.endswith("gpu-check --device cuda --size small --json --only gradients")
    assert len(results["parts"]) == 5


def test_a_missing_sanitizer_is_reported_after_failures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_sanitizer", lambda: None)
    right = session.PartResult("gpu-check training", 1.0, None, {"passed": True})
    skipped_part = session.PartResult("gpu-check memory", None, "no time left")
    assert session.sanitizer("program", [right, skipped_part]) is None
    result = session.sanitizer(
        "program", [right, session.PartResult("gpu-check gradients", 90.0, "stopped after 90 s")]
    )
    assert isinstance(result, session.PartResult)
    assert result.failure is not None
    assert "not installed" in result.failure


def test_libraries_are_those_of_the_given_interpreter(tmp_path: Path) -> None:
    """A virtual environment's interpreter is a link to one with other packages."""
    environment = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    assert python.resolve() == Path(sys.executable).resolve()
    [packages] = environment.glob("lib/python*/site-packages")
    libraries = packages / "nvidia" / "cublas" / "lib"
    libraries.mkdir(parents=True)
    assert str(libraries) in session.library_path(str(python)).split(os.pathsep)


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere/python does not say where its packages are"):
        session.library_path(str(tmp_path / "nowhere" / "python"))
