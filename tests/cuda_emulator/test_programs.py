"""The programs on machines with and without a GPU: what they print, what they refuse, and what they do with one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_emulator.library import Emulator
from cuda_emulator.runs import Runs, Tiny

TINY = Tiny(steps=2, checkpoint_every=2)
with_adapters_or_without = pytest.mark.parametrize(
    "lora",
    [None, {"rank": 4, "dropout": 0.1}, {"rank": 4, "base_precision": "fp8"}],
    ids=["all-weights", "adapters", "fp8-base"],
)


def without(runs: Runs, library: str, tmp_path: Path) -> Runs:
    """Return the runs on a machine that lacks one library."""
    folder = tmp_path / "libraries"
    shutil.copytree(runs.emulator.libraries, folder)
    (folder / library).unlink()
    return Runs(runs.workspace, Emulator(folder, runs.emulator.python, runs.emulator.settings))


@pytest.mark.parametrize("library", ["libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"])
def test_a_missing_library_is_named(runs: Runs, tmp_path: Path, library: str) -> None:
    runs.write("run", TINY)
    name = library.split(".")[0]
    without(runs, library, tmp_path).train("run").refused(2, "driver" if name == "libcuda" else name)
    assert not (runs.workspace.run_folder("run") / "checkpoints").exists()


def test_without_a_gpu_auto_takes_the_cpu_and_cuda_is_refused(runs: Runs) -> None:
    runs.write("run", TINY)
    none = runs.having(gpus=0)
    none.train("run").refused(2)
    none.train("run", device="auto").succeeded()
    assert runs.trained("cpu", TINY, "cpu")
    assert runs.steps("run") == runs.steps("cpu")


def test_with_a_gpu_auto_takes_it(runs: Runs) -> None:
    runs.write("run", TINY)
    with_report = runs.having(report=runs.workspace.root / "report.json")
    process = with_report.train("run", device="auto").succeeded()
    assert "cuda:0" in process.out
    report = with_report.emulator.report()
    assert report["launches"] > 0
    assert report["contexts"] == 1, "opening one takes a good part of a second"


def test_a_gpu_that_is_not_there_is_refused(runs: Runs) -> None:
    runs.write("run", TINY)
    runs.train("run", device="cuda:1").refused(2, "cuda:1")


def test_too_old_gpus_are_refused_with_a_reason(runs: Runs) -> None:
    runs.write("run", TINY)
    old = runs.having(gpu="Tesla T4", capability="7.5")
    old.train("run").refused(2, "Tesla T4 has compute capability 7.5")
    process = old.train("run", device="auto").succeeded()
    assert "on the CPU: Tesla T4 has compute capability 7.5" in process.out + process.err


def test_too_small_gpus_are_refused_before_allocation(runs: Runs) -> None:
    runs.write("run", TINY)
    small = runs.having(memory=96 << 20, report=runs.workspace.root / "report.json")
    small.train("run").refused(4)
    assert small.emulator.report()["allocations"] == 0
    full = runs.having(used=930 << 20)
    full.train("run").refused(4)


def test_a_driver_of_cuda_12_8_takes_what_this_program_brings(runs: Runs) -> None:
    """It takes a cuBLAS of its time; an older driver, or a newer cuBLAS, is refused."""
    runs.write("run", TINY)
    runs.having(driver=12060, cublas=120602).train("run").refused(2, "driver")
    runs.having(driver=12080, cublas=130100).train("run").refused(2, "cuBLAS 13.1.0")
    runs.having(driver=12080, cublas=120804).train("run").refused(2, "cuRAND 10.4.0")
    runs.having(driver=12080, cublas=120804, curand=100309).train("run").succeeded()


@pytest.mark.parametrize(("gpu", "capability"), [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA H200", "9.0")])
def test_every_family_of_gpus_trains_alike(runs: Runs, gpu: str, capability: str) -> None:
    """Other kernels give the same numbers up to the order of sums."""
    other = runs.having(gpu=gpu, capability=capability)
    losses = [row[1] for row in other.steps(other.trained("run", TINY))]
    assert losses == pytest.approx([row[1] for row in runs.steps(runs.trained("usual", TINY))], rel=4e-3)


def test_a_refused_kernel_shows_the_compilers_message(runs: Runs) -> None:
    runs.write("run", TINY)
    words = "line 9; fatal : Parsing error near 'refused'; ptxas fatal : Ptx assembly aborted"
    process = runs.having(jit="refuses").train("run").refused(1, "cuModuleLoadDataEx of `", "INVALID_PTX", words)
    assert len(process.err.strip().splitlines()) == 1


def test_a_missing_ptx_compiler_is_named(runs: Runs) -> None:
    runs.write("run", TINY)
    runs.having(jit="missing").train("run").refused(2, "cuda:0", "libnvidia-ptxjitcompiler.so.1", "install")


def test_generate_and_evaluate_run_on_the_gpu(runs: Runs) -> None:
    checkpoint = runs.checkpoint(runs.trained("run", Tiny(steps=2, checkpoint_every=2, precision="fp32")), 2)
    flags = "--prompt=hello --max-tokens=6 --temperature=0 --json".split()
    words = ["generate", "--checkpoint", str(checkpoint), *flags]
    texts = [json.loads(runs.program(*words, "--device", device).succeeded().out) for device in ("cpu", "cuda")]
    assert texts[0]["completion"] == texts[1]["completion"]
    assert texts[0]["tokens"] == texts[1]["tokens"]
    words = ["evaluate", "--checkpoint", str(checkpoint), "--input", str(runs.text), "--max-sequences", "2", "--json"]
    reports = [json.loads(runs.program(*words, "--device", device).succeeded().out) for device in ("cpu", "cuda")]
    assert reports[1]["loss"] == pytest.approx(reports[0]["loss"], rel=1e-5)


def test_a_limit_on_the_gpus_memory_is_kept_to(runs: Runs) -> None:
    runs.write("run", TINY)
    runs.train("run", "--override", "runtime.memory_limit=8MiB").refused(4, "runtime.memory_limit")


@with_adapters_or_without
def test_a_step_waits_once_and_allocates_nothing(runs: Runs, lora: dict[str, Any] | None) -> None:
    """Waits and allocations of a step are counted as the difference of two runs."""
    base = runs.checkpoint(runs.trained("base", Tiny(steps=2), "cpu"), 2) if lora else None
    counts = {}
    for steps in (4, 8):
        tiny = Tiny(steps=steps, checkpoint_every=100, accumulation=3, init_from=base, lora=lora)
        counting = runs.having(report=runs.workspace.root / f"report-{steps}.json")
        counting.write(f"run-{steps}", tiny)
        off = ("--override", "runtime.evaluation.every_n_steps=null")
        counting.train(f"run-{steps}", *off).succeeded()
        counts[steps] = counting.emulator.report()
    more = {name: counts[8][name] - counts[4][name] for name in counts[4] if name != "kernels"}
    assert more["allocations"] == more["frees"] == more["pinned_allocations"] == 0
    assert more["graph_launches"] == 4 * 3
    assert more["gemms"] == 0, "every GEMM of a step is in its graph"
    assert more["captures"] == more["modules"] == 0
    assert more["pageable_copies"] == 0
    assert more["drains"] == 4
    assert more["spins"] == 0, "the data loader needs the cores"


@with_adapters_or_without
def test_the_plan_is_what_the_gpu_then_holds(runs: Runs, lora: dict[str, Any] | None) -> None:
    base = runs.checkpoint(runs.trained("base", TINY, "cpu"), 2) if lora else None
    counting = runs.having(report=runs.workspace.root / "report.json")
    planned_bytes = counting.metrics(counting.trained("run", replace(TINY, init_from=base, lora=lora)))[-1][
        "memory_bytes"
    ]
    # Beside the plan: a piece of 4 MiB in which weights are made before the first step, one more for those of adapters,
    # and the ends of allocations.
    pieces = 2 if lora else 1
    assert (
        planned_bytes <= counting.emulator.report()["allocated_high"] <= planned_bytes + pieces * (4 << 20) + (64 << 10)
    )
