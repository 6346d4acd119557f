"""The benchmark session on a GPU, with fake programs in place of the trainer, PyTorch, nvidia-smi and ncu."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import profile_kernels
import pytest
import session
from session_parts import ASSUMED_STEP_SECONDS, Duration, Measured, Part, PartResult, fit_to_budget, run
from session_summary import decisions
from workspace import REPOSITORY

BENCHES = REPOSITORY / "benches" / "gpu"
CAPPED = {
    "tokens_per_second": 300.0,
    "tokens_per_step": 600,
    "mfu": 0.6,
    "memory_bytes": 30_000_000_000,
    "memory_used_bytes": 27_000_000_000,
    "nominal_flops_per_second": 209.5e12,
    "milliseconds": {"step": 2000.0, "gemm": 1300.0, "attention": 400.0},
}
FAILED = {"check": "model bf16: qkv", "failure": "NaN is more than 1.0e-3"}
GRADIENTS = {"part": "gradients", "passed": False, "rows": [{"check": "model bf16: down", "failure": None}, FAILED]}
TRAINER = """#!/bin/sh
case "$*" in
  *"--only gradients"*) echo 'a row' >&2; echo "$GRADIENTS"; exit 1 ;;
  gpu-check*) echo '{"part": "any", "passed": true, "rows": []}' ;;
  *precision=fp8*) echo '{"tokens_per_second": 450.0, "tokens_per_step": 600}' ;;
  *memory_limit*) echo "$CAPPED" ;;
  *) echo 'error: out of everything' >&2; exit 4 ;;
esac
"""
# The sweep of GEMMs waits for the log of clocks, which would otherwise be stopped before it has begun.
PYTHON = """#!/bin/sh
torch() { echo "{\\"contender\\": \\"torch\\", \\"attention\\": \\"$1\\", \\"tokens_per_second\\": $2}"; }
case "$*" in
  -c*) echo '[]' ;;
  *gemm_sweep*) [ -z "$CLOCKS" ] || until [ -s "$CLOCKS" ]; do :; done; echo '{"measured": 2}' ;;
  */sweep.py*) echo '{"kernel": "pytorch flash forward", "head_size": 64, "milliseconds": 0.5}' ;;
  *eager*) echo 'no such kernel' ;;
  *--fp8*) torch cudnn 320; torch flash 300 ;;
  *"--attention both"*) torch cudnn 250; torch flash 240 ;;
  *) echo '{"micro_batch": 1}'; echo '{"tokens_per_second": 200.0, "mfu": 0.4, "micro_batch": 1}' ;;
esac
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *loop-ms*) echo "$*" > "$CLOCKS"; echo '2026/11/28 12:00:00.000, 1400, 690.5, 60, 0x0000000000000004' ;;
  *) echo 'NVIDIA H100, 580.1' ;;
esac
"""
NCU_TABLE = """"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","attention_forward(...)","GPU Speed Of Light Throughput","Duration","us","512.3"
"0","attention_forward(...)","GPU Speed Of Light Throughput","Memory Throughput","%","21.5"
"0","attention_forward(...)","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","61.0"
"0","attention_forward(...)","Memory Workload Analysis","Memory Throughput","Gbyte/s","700.1"
"0","attention_forward(...)","Launch Statistics","Registers Per Thread","register/thread","128"
"""
NCU = f"""#!/bin/sh
echo "$*" > "$NCU_CALL"
while [ "$1" != --log-file ]; do shift; done
cat > "$2" <<'END'
==PROF== Connected to process 7
{NCU_TABLE}END
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


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the tools of NVIDIA."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("ncu", NCU), ("compute-sanitizer", SANITIZER)):
        script(folder / name, text)
    return folder


def session_of(folder: Path, *options: str, tools: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Run a session with the programs above; return what it prints and the content of results.json."""
    program, python = folder / "transformer-candle.gz", script(folder / "python", PYTHON)
    program.write_bytes(gzip.compress(TRAINER.encode()))
    paths = ["--program", str(program), "--python", str(python), "--out", str(folder)]
    answers = {"CAPPED": json.dumps(CAPPED), "GRADIENTS": json.dumps(GRADIENTS)}
    answers |= {"CLOCKS": str(folder / "clocks-call") if tools else "", "NCU_CALL": str(folder / "ncu-call")}
    path = os.pathsep.join([str(tools), os.environ["PATH"]] if tools else [os.environ["PATH"]])
    command = [sys.executable, str(BENCHES / "session.py"), *paths, *options]
    environment = {**os.environ, "PATH": path, **answers}
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout, json.loads((folder / "results.json").read_text())


def commands(folder: Path) -> list[str]:
    return [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("$ ")]


def names(results: dict[str, Any]) -> list[str]:
    return [part["part"] for part in results["parts"]]


def all_sections() -> list[session.Section]:
    return session.sections(session.Programs("program", "python", Path("c.yaml"), Path("out")))


CHECKS = [f"gpu-check {name}" for name in ("training", "gradients", "memory", "operations")]
BENCH = ["ours bf16", "ours fp8", "ours bf16", "torch bf16", "torch fp8"]
COMPARED = ["ours, capped", "torch.compile, capped", "ours", "torch.compile"]


def test_a_session_measures_section_by_section(tmp_path: Path, tools: Path) -> None:
    printed, results = session_of(tmp_path, tools=tools)
    sanitizer = "compute-sanitizer"
    assert names(results) == ["gemm", "attention 64", "attention 128", *BENCH, "ncu", *CHECKS, sanitizer]
    failed = [part["part"] for part in results["parts"] if part["failure"]]
    assert failed == ["ncu", "gpu-check gradients", sanitizer], "ncu profiled one kernel of three"

    called = commands(tmp_path)
    assert "gemm_sweep.py --config" in called[0]
    assert "--head-size 64 --heads 32 --kv-heads 8" in called[1]
    assert "--head-size 128 --heads 16 --kv-heads 4" in called[2]
    limit, fp8 = "runtime.memory_limit=32122MiB", "runtime.precision=fp8"
    assert all(limit in command for command in called[3:6])
    assert [fp8 in command for command in called[3:6]] == [False, True, False], "fp8 between two runs of bf16"
    assert all("--attention both" in command and "--memory-limit 32122MiB" in command for command in called[6:8])
    assert ["--fp8" in command for command in called[6:8]] == [False, True]

    profiled = (tmp_path / "ncu-call").read_text()
    assert profiled.startswith("--clock-control none --kernel-id ::regex:^(attention_forward|")
    assert " bench --config " in profiled
    logged = (tmp_path / "clocks-call").read_text()
    assert "clocks.sm,power.draw" in logged
    assert {path.name for path in tmp_path.glob("clocks-*.csv")} == {
        f"clocks-{name}.csv" for name in ("gemm", "attention", "bench", "ncu", "check")
    }

    assert printed.splitlines()[-4:] == [
        "ours bf16 / torch bf16 with cudnn: 1.200 (300 and 250 tokens/s)",
        "ours fp8 / torch fp8 with cudnn: 1.406 (450 and 320 tokens/s)",
        "ours fp8 / ours bf16: 1.500 (450 and 300 tokens/s)",
        "fastest of ours (ours fp8) / fastest of PyTorch (torch fp8): 1.406",
    ]
    assert "ours bf16, ms of a step: 2,000 (gemm 1,300, attention 400)" in printed
    assert "attention_forward: duration 512.3 us, memory 21.5 %, sm 61.0 %, registers 128 register/thread" in printed
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.startswith("NVIDIA H100, 580.1\n")
    assert printed.rstrip().endswith(summary.split("\n", 1)[1].rstrip())


def test_only_the_selected_sections_run_in_order(tmp_path: Path, tools: Path) -> None:
    _, results = session_of(tmp_path, "--only", "ncu, gemm", tools=tools)
    assert names(results) == ["gemm", "ncu"]


@pytest.mark.parametrize("only", ["nonsense", "gemm,nonsense", "gemm,", ""])
def test_an_unknown_section_is_refused(tmp_path: Path, only: str) -> None:
    program = script(tmp_path / "program", "#!/bin/sh\n")
    words = ["--program", str(program), "--out", str(tmp_path / "out"), "--only", only]
    command = [sys.executable, str(BENCHES / "session.py"), *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    unknown = only.split(",")[-1]
    known = "gemm, attention, bench, ncu, check, lora, compare"
    assert f"there is no section {unknown!r}: there are {known}\n" in process.stderr
    assert not (tmp_path / "out").exists()


def test_the_budgets_leave_time_to_check_within_ten_minutes() -> None:
    budgets = {section.name: section.budget for section in all_sections()}
    assert budgets == {
        "gemm": 120,
        "attention": 60,
        "bench": 198,
        "ncu": 40,
        "check": None,
        "lora": None,
        "compare": None,
    }
    left = session.SECONDS - sum(filter(None, budgets.values()))
    assert session.SECONDS < 600
    assert left >= max(session.CHECK_SECONDS.values())
    for section in all_sections():
        if section.budget is not None:
            assert sum(part.limit.to_seconds(0) for part in section.parts) <= section.budget
            assert all(part.limit.steps == 0 for part in section.parts)


def test_a_section_that_hangs_leaves_the_next_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    hanging = script(tmp_path / "hanging", "#!/bin/sh\necho row 1\nexec sleep 100\n")
    quick = script(tmp_path / "quick", "#!/bin/sh\necho '{\"passed\": true}'\n")
    at_once = Duration(0)
    parts = [Part(name, [str(program)], Duration(100), at_once) for name, program in (("a", hanging), ("b", hanging))]
    measured = session.Session(tmp_path, time.monotonic() + 1000, environment, {})
    measured.run_section(session.Section("hangs", 0.5, parts), "")
    measured.run_section(session.Section("next", 60, [Part("c", [str(quick)], Duration(60))]), "")
    failures = [outcome.failure for outcome in measured.outcomes]
    assert failures == ["stopped after 0 s: row 1", "no time left: it needs 0 s, and there are 0", None]


def dry_run(capability: str) -> dict[str, Any]:
    words = ["--config", str(REPOSITORY / "configs" / "rtx5090_1b.yaml"), "--dry-run", "--capability", capability]
    command = [sys.executable, str(BENCHES / "gemm_sweep.py"), *words]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    listed: dict[str, Any] = json.loads(process.stdout)
    return listed


def test_the_sweep_lists_its_gemms_without_a_gpu() -> None:
    listed = dry_run("9.0")
    sizes = {(one["linear"], one["direction"]): (one["m"], one["n"], one["k"]) for one in listed["shapes"]}
    assert len(sizes) == 12
    assert sizes["qkv", "forward"] == (8192, 3072, 2048)
    assert sizes["out", "forward"] == (8192, 2048, 2048)
    assert sizes["gate_up", "backward_input"] == (8192, 2048, 16384)
    assert sizes["down", "backward_weight"] == (2048, 8192, 8192)
    results = {(one["direction"], one["output"], one["beta"]) for one in listed["configurations"]}
    gradients = [("backward_weight", "f32", beta) for beta in (0, 1)]
    assert results == {("forward", "bf16", 0), ("backward_input", "bf16", 0), *gradients}


def test_the_sweep_has_the_precisions_of_the_gpu() -> None:
    fp8 = {"bf16", "tensorwise", "tensorwise-fast"}
    expected = {
        "8.0": {"bf16"}, "8.9": fp8, "9.0": fp8 | {"blockwise", "blockwise-128"}, "12.0": fp8 | {"mxfp8"},
    }  # fmt: skip
    for capability, precisions in expected.items():
        configurations = dry_run(capability)["configurations"]
        assert {one["precision"] for one in configurations} == precisions
    assert {one["direction"] for one in dry_run("9.0")["configurations"] if one["precision"] == "blockwise-128"} == {
        "forward", "backward_input",
    }, "the gradient of a weight has no weight as an operand"  # fmt: skip


def gemm(precision: str, milliseconds: float | None, direction: str = "forward", **more: Any) -> dict[str, Any]:
    sizes = {"m": 1000, "n": 1000, "k": 1000}
    row = {"linear": "qkv", "direction": direction, **sizes, "beta": 0, "precision": precision}
    return {**row, "milliseconds": milliseconds, **more}


def test_the_summary_compares_precisions_and_candidates(tmp_path: Path) -> None:
    searched: dict[str, Any] = {"first_milliseconds": 0.5, "best_of_16_milliseconds": 0.42}
    rows = [
        gemm("bf16", 0.5), gemm("bf16", 0.4, **searched), gemm("tensorwise", 0.2), gemm("blockwise", None),
        gemm("bf16", 0.1, "backward_weight", beta=0), gemm("bf16", 0.3, "backward_weight", beta=1),
    ]  # fmt: skip
    kernels = {"attention_forward": 0.3, "attention_backward_queries": 0.4, "attention_backward_keys": 0.5}
    rows += [{"kernel": f"{name}.bf16.e64", "milliseconds": time} for name, time in kernels.items()]
    rows += [{"kernel": "attention_forward.bf16.e64", "milliseconds": time} for time in (0.25, None)]
    rows += [
        {"kernel": f"pytorch cudnn {direction}", "head_size": 64, "milliseconds": 0.125}
        for direction in ("forward", "backward")
    ]
    lines = decisions([PartResult("gemm", 1.0, None, {}, rows)], tmp_path)
    assert lines == [
        "attention, heads of 64, forward + backward: ours 0.250 + 0.900 ms, cudnn 0.125 + 0.125 ms",
        "GEMMs of a block, bf16: 0.70 ms, 6 TFLOP/s",
        "GEMMs of a block, tensorwise: 0.20 ms, 10 TFLOP/s, 2.00 x bf16 (1 of 2 GEMMs)",
        "GEMMs, 64 candidates instead of 16: 4.8% less time",
        "GEMMs, 64 candidates instead of the first: 20.0% less time",
    ]


def test_the_summary_has_the_medians_of_clocks_and_power(tmp_path: Path) -> None:
    samples = ["12:00, 1400, 690.5, 60, 0x4", "12:01, 1500, 700, 62, 0x4", "12:02, [N/A], 1, 1, 0x0", "12:03, 13"]
    (tmp_path / "clocks-gemm.csv").write_text("\n".join(samples))
    (tmp_path / "clocks-ncu.csv").write_text("Field is not a valid field to query.\n")
    assert decisions([], tmp_path) == ["gemm: 1,450 MHz, 695 W, 61 C (medians of 2 samples)"]


@pytest.mark.parametrize(
    ("log", "code", "message"),
    [
        (None, 2, "ncu is not installed: it is Nsight Compute, a part of a CUDA toolkit\n"),
        (NCU_TABLE, 0, ""),
        ("==ERROR== ERR_NVGPUCTRPERM\n", 1, "not profiled: attention_forward (==ERROR== ERR_NVGPUCTRPERM)\n"),
    ],
)
def test_kernels_are_profiled_or_it_is_said_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], log: str | None, code: int,
    message: str,
) -> None:  # fmt: skip
    ncu = script(tmp_path / "ncu", NCU.replace(NCU_TABLE, log or ""))
    monkeypatch.setattr(profile_kernels, "find_tool", lambda name: str(ncu) if log else None)
    monkeypatch.setenv("NCU_CALL", str(tmp_path / "ncu-call"))
    words = ["profile_kernels.py", "--program", "trainer", "--kernel", "attention_forward"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "ncu.csv")])
    assert profile_kernels.main() == code
    printed = capfd.readouterr()
    assert printed.err == message
    if code == 0:
        assert json.loads(printed.out)["memory_percent"] == "21.5 %", "not the rate of the same name"


def test_a_hanging_part_is_killed_with_its_children(tmp_path: Path) -> None:
    hanging = script(tmp_path / "hanging", "#!/bin/sh\necho row 1\nsleep 100 &\nsleep 100\n")
    part = Part("hangs", [str(hanging)], Duration(0.5), Duration(0))
    begin = time.monotonic()
    outcome = run(part, Measured(), 60, dict(os.environ), tmp_path / "log.txt")
    assert time.monotonic() - begin < 10
    assert outcome.failure == "stopped after 0 s: row 1"
    assert outcome.result == {}


def test_the_table_compares_rounds_and_names_failures(tmp_path: Path) -> None:
    printed, results = session_of(tmp_path, "--only", "compare", "--seconds", "2000")
    assert "ours / torch.compile, capped: 1.500 (rounds: 2)" in printed
    assert "exit code 4: error: out of everything" in printed
    assert "printed no result" in printed
    assert "60.0%" in printed
    assert names(results) == [*COMPARED, "torch eager, capped", "torch eager", *COMPARED]


def test_lora_is_measured_beside_each_kind_of_base(tmp_path: Path) -> None:
    printed, results = session_of(tmp_path, "--only", "lora", "--seconds", "4000")
    assert names(results) == ["LoRA bf16", "LoRA fp8 base", "LoRA fp8", "peft bf16"]
    called = commands(tmp_path)
    model = f"model.init_from={BENCHES.parent / 'llama_8b'}"
    assert all(model in command and "--steps 20" in command for command in called[:3])
    assert ["lora.base_precision=fp8" in command for command in called[:3]] == [False, True, False]
    assert ["runtime.precision=fp8" in command for command in called[:3]] == [False, False, True]
    assert "torch_lora.py --model" in called[3]
    assert "LoRA bf16: 300 tokens/s, 27.00 GB used, 0.900 of the plan, 1.50 x peft" in printed
    assert "LoRA fp8: 450 tokens/s, 2.25 x peft" in printed


def test_every_part_requires_a_gpu(tmp_path: Path, tools: Path) -> None:
    """If a library is missing, no part may benchmark the CPU for minutes. The sweeps have no way to run on it."""
    session_of(tmp_path, tools=tools)
    session_commands = commands(tmp_path)
    session_of(tmp_path, "--only", "compare", tools=tools)
    measured = [command for command in [*session_commands, *commands(tmp_path)] if "sweep.py" not in command]
    assert len(measured) > 20
    assert [
        command for command in measured if "--device cuda" not in command and "profile_kernels" not in command
    ] == []


def test_skipped_parts_are_in_the_results(tmp_path: Path) -> None:
    _, results = session_of(tmp_path, "--seconds", "5")
    assert len(results["parts"]) == 13
    assert all("no time left" in part["failure"] for part in results["parts"])
    assert not (tmp_path / "log.txt").exists(), "nothing was run"


def test_parts_are_sized_by_the_measured_step(tmp_path: Path) -> None:
    session_of(tmp_path, "--only", "compare", "--seconds", "2000")
    seconds = [float(command.split("--seconds ")[1].split()[0]) for command in commands(tmp_path)]
    start, compiling, assumed, measured = session.START_SECONDS, session.COMPILE_SECONDS, ASSUMED_STEP_SECONDS, 2.0
    assert seconds[0] == start + 9 * assumed
    assert seconds[1] == start + 2 * compiling + 8 * measured, "room to compile twice"
    assert seconds[6] == start + 9 * measured
    assert "--peak 209500000000000" in commands(tmp_path)[1], "PyTorch's MFU has our peak"


def test_our_bench_has_time_for_its_steps_on_every_gpu() -> None:
    """The steps are those of a 5090, an A100 and an H200; the time limit ends after the budget."""
    [ours] = [part for part in all_sections()[-1].parts if part.name == "ours"][:1]
    for step in (6.6, 7.0, 1.9):
        fitted = fit_to_budget(ours, Measured(step=step), 400)
        assert fitted is not None
        command, limit = fitted
        budget = float(command[-1])
        assert budget >= session.START_SECONDS + 9 * step - 1
        assert limit >= budget + step
    assert fit_to_budget(ours, Measured(step=6.6), 45) is None


def test_gpu_check_runs_part_by_part(tmp_path: Path) -> None:
    printed, results = session_of(tmp_path, "--only", "check")
    assert names(results)[:4] == CHECKS
    assert [part["result"].get("passed") for part in results["parts"]][:4] == [True, False, True, True]
    assert "exit code 1: model bf16: qkv: NaN is more than 1.0e-3" in printed


def test_failed_checks_are_repeated_under_the_sanitizer(tmp_path: Path, tools: Path) -> None:
    printed, results = session_of(tmp_path, "--only", "check", tools=tools)
    assert results["parts"][4]["part"] == "compute-sanitizer"
    assert "exit code 86: ========= ERROR SUMMARY: 2 errors" in printed
    last = commands(tmp_path)[-1]
    assert last.startswith(f"$ {tools}/compute-sanitizer --error-exitcode 86 ")
    assert last.endswith("gpu-check --device cuda --size small --json --only gradients")
    assert len(results["parts"]) == 5


def test_a_missing_sanitizer_is_reported_after_failures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_tool", lambda name: None)
    passed = PartResult("gpu-check training", 1.0, None, {"passed": True})
    skipped_part = PartResult("gpu-check memory", None, "no time left")
    other = PartResult("gemm", 120.0, "stopped after 120 s")
    assert session.sanitizer("program", [passed, skipped_part, other]) is None
    result = session.sanitizer("program", [passed, PartResult("gpu-check gradients", 90.0, "stopped after 90 s")])
    assert isinstance(result, PartResult)
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
