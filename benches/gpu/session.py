"""Measures a GPU in under ten minutes, section by section: `benches/gpu/session.sh [OPTIONS]`.

    gemm        the GEMMs of a block in bf16 and fp8, by 64 algorithms of cuBLASLt and by PyTorch
    attention   our tiles, beside cuDNN and FlashAttention in PyTorch
    bench       `configs/rtx5090_1b.yaml` in the memory of an RTX 5090: ours in bf16, fp8 and bf16 again, then PyTorch
    ncu         attention and the norm's backward under Nsight Compute
    check       the GPU compared with the CPU by the parts of `gpu-check`, in what is left of the time
    lora        only on request: adapters beside 8 billion parameters in bf16 and fp8, then peft with torch.compile
    compare     only on request: ours beside PyTorch with and without the memory limit, while time is left

Every section has a time budget, and every part of it is a process with a time limit, so that one that hangs or fails
does not affect the others. After a failed check compute-sanitizer, where installed, repeats it at small sizes.
results.json and log.txt in --out are up to date after every part; clocks-SECTION.csv has clocks and power meanwhile.
A table is printed at the end, and last the figures that decisions need: summary.txt.

It needs a driver, PyTorch for this GPU and the program that `make cuda` built, gzipped or not. It needs neither a
compiler nor the Python package.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from profile_kernels import find_tool
from session_parts import REPOSITORY, Duration, Measured, Part, PartResult, run
from session_summary import decisions, table

HERE = Path(__file__).resolve().parent
LLAMA_8B = HERE.parent / "llama_8b"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
PROGRAMS = (TARGET / "cuda" / "release" / "transformer-candle", TARGET / "cuda" / "transformer-candle.gz")
GPU_QUERY = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit"
CLOCK_QUERY = "timestamp,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
CLOCK_MILLISECONDS = 200
# How long nvidia-smi may take to answer, or to end.
QUERY_SECONDS = 10
# What CUDA reports on an RTX 5090. nvidia-smi reports 32,607 MiB, of which 485 are never available to a program.
MEMORY_LIMIT = "32122MiB"

SECONDS = 570
"""Budget of a session: four sections, and what is left of it for the checks."""
# How long a part that is cut short may take to exit, so that the next has its share.
EXIT_SECONDS = 5.0
# Assumed durations. Start-up: opening the GPU, initialising weights and timing algorithms, or importing PyTorch.
START_SECONDS = 30.0
# torch.compile of the model for one micro-batch size.
COMPILE_SECONDS = 75.0
# The parts of gpu-check in order, with their time limits: those that take seconds first.
CHECK_SECONDS = {"training": 60.0, "gradients": 90.0, "memory": 120.0, "operations": 150.0}
SANITIZER = "compute-sanitizer"
SANITIZER_SECONDS = 120.0
# Exit code of compute-sanitizer if it reports an error.
SANITIZER_EXIT_CODE = "86"


@dataclass(frozen=True)
class Section:
    """Parts that share a time budget."""

    name: str
    # Seconds; None for what is left of the session.
    budget: float | None
    parts: list[Part]


@dataclass(frozen=True)
class Programs:
    """What is measured, and where files go."""

    trainer: str
    python: str
    config: Path
    out: Path


def sections(programs: Programs) -> list[Section]:
    """Return the sections in order. Those with a budget leave two and a half minutes to the checks."""
    return [
        Section("gemm", 120, [gemms(programs, seconds=112)]),
        Section("attention", 60, [attention(programs, *heads, seconds=28) for heads in ((64, 32, 8), (128, 16, 4))]),
        Section("bench", 198, [*ours_in_turn(programs, seconds=32), *peers(programs, seconds=47)]),
        Section("ncu", 40, [profile(programs, seconds=40)]),
        Section("check", None, checks(programs.trainer)),
        Section("lora", None, adapters(programs)),
        Section("compare", None, comparison(programs)),
    ]


ON_REQUEST = {"compare", "lora"}


def gemms(programs: Programs, seconds: float) -> Part:
    """Return the sweep of GEMMs."""
    command = [programs.python, str(HERE / "gemm_sweep.py"), "--config", str(programs.config)]
    return Part("gemm", command, Duration(seconds), budgeted=True, grace=EXIT_SECONDS)


def attention(programs: Programs, head_size: int, heads: int, kv_heads: int, seconds: float) -> Part:
    """Return the sweep of attention's tiles at one head size, with the same FLOPs at each."""
    sizes = ["--head-size", str(head_size), "--heads", str(heads), "--kv-heads", str(kv_heads)]
    command = [programs.python, str(HERE / "sweep.py"), "--declared", "--pytorch", *sizes]
    return Part(f"attention {head_size}", command, Duration(seconds), budgeted=True, grace=EXIT_SECONDS)


def ours(programs: Programs, name: str, limit: Duration, minimum: Duration, *overrides: str, steps: int = 6) -> Part:
    """Return a benchmark of ours: a warm-up step, those that are measured, and two timed operation by operation."""
    command = [programs.trainer, "bench", "--json", "--config", str(programs.config), "--device", "cuda"]
    words = [word for override in overrides for word in ("--override", override)]
    return Part(name, [*command, "--steps", str(steps), *words], limit, minimum, budgeted=True)


def ours_in_turn(programs: Programs, seconds: float) -> list[Part]:
    """Return the benchmarks of bf16, fp8 and bf16 again, so that a drift of the clocks shows."""
    budget, capped = (Duration(seconds), Duration(seconds / 2)), f"runtime.memory_limit={MEMORY_LIMIT}"
    bf16 = ours(programs, "ours bf16", *budget, capped)
    fp8 = ours(programs, "ours fp8", *budget, capped, "runtime.precision=fp8")
    return [replace(part, grace=EXIT_SECONDS) for part in (bf16, fp8, bf16)]


def peers(programs: Programs, seconds: float) -> list[Part]:
    """Return the benchmarks of PyTorch with both attention kernels; blocks are compiled by themselves to save time."""
    command = [programs.python, str(HERE / "torch_llama.py"), "--config", str(programs.config), "--device", "cuda"]
    command += ["--mode", "compile-blocks", "--attention", "both", "--micro-batch", "2,1", "--steps", "3"]
    command += ["--memory-limit", MEMORY_LIMIT]
    budget = Duration(seconds), Duration(seconds / 2)
    return [
        Part("torch bf16", command, *budget, budgeted=True, grace=EXIT_SECONDS),
        Part("torch fp8", [*command, "--fp8"], *budget, budgeted=True, grace=EXIT_SECONDS),
    ]


def profile(programs: Programs, seconds: float) -> Part:
    """Return the profile of kernels under Nsight Compute."""
    paths = ["--program", programs.trainer, "--config", str(programs.config), "--out", str(programs.out / "ncu.csv")]
    return Part("ncu", [sys.executable, str(HERE / "profile_kernels.py"), *paths], Duration(seconds))


def checks(program: str) -> list[Part]:
    """Return the parts of gpu-check, each in a process of its own so that a crash loses one part only."""
    command = [program, "gpu-check", "--device", "cuda", "--json", "--only"]
    return [Part(f"gpu-check {part}", [*command, part], Duration(seconds)) for part, seconds in CHECK_SECONDS.items()]


def adapters(programs: Programs) -> list[Part]:
    """Return the benchmarks of LoRA in the memory of an RTX 5090, twenty steps each."""
    config, model = LLAMA_8B / "training.yaml", f"model.init_from={LLAMA_8B}"
    on_8b, capped = replace(programs, config=config), f"runtime.memory_limit={MEMORY_LIMIT}"
    # Weights are drawn, rounded and copied first.
    duration = Duration(2 * START_SECONDS, 21), Duration(2 * START_SECONDS, 2)

    def with_base(name: str, *overrides: str) -> Part:
        return ours(on_8b, name, *duration, model, capped, *overrides, steps=20)

    words = ["--model", str(LLAMA_8B), "--config", str(config), "--memory-limit", MEMORY_LIMIT, "--device", "cuda"]
    # Without recomputation half a micro-batch of 8 billion parameters in bf16 fits.
    peft = [programs.python, str(HERE / "torch_lora.py"), *words, "--recompute", "--micro-batch", "4,2,1"]
    compiling = Duration(START_SECONDS + 2 * COMPILE_SECONDS, 21), Duration(START_SECONDS + COMPILE_SECONDS, 2)
    return [
        with_base("LoRA bf16"),
        with_base("LoRA fp8 base", "lora.base_precision=fp8"),
        with_base("LoRA fp8", "runtime.precision=fp8"),
        Part("peft bf16", peft, *compiling, budgeted=True),
    ]


def sanitizer(program: str, outcomes: list[PartResult]) -> Part | PartResult | None:
    """Return the part that repeats failed checks under compute-sanitizer, or why there is none; None if all passed."""
    checked = [outcome for outcome in outcomes if outcome.part.startswith("gpu-check ")]
    failed = [outcome.part.removeprefix("gpu-check ") for outcome in checked if outcome.failed]
    if not failed:
        return None
    path = find_tool(SANITIZER)
    if path is None:
        return PartResult(SANITIZER, None, "not installed: it is part of a CUDA toolkit")
    only = [word for part in failed for word in ("--only", part)]
    command = [program, "gpu-check", "--device", "cuda", "--size", "small", "--json", *only]
    return Part(SANITIZER, [path, "--error-exitcode", SANITIZER_EXIT_CODE, *command], Duration(SANITIZER_SECONDS))


def comparison(programs: Programs) -> list[Part]:
    """Return ours beside PyTorch, sized by the last measured step; ours beside torch.compile is repeated at the end."""
    torch = [programs.python, str(HERE / "torch_llama.py"), "--config", str(programs.config), "--device", "cuda"]
    compiled = [*torch, "--mode", "compile", "--micro-batch"]
    in_full = Duration(START_SECONDS, 9), Duration(START_SECONDS, 3)

    def of_torch(name: str, compilations: int, command: list[str], *options: str) -> Part:
        # Four micro-batches of each size tried; then one warm-up step and four measured.
        limit = Duration(START_SECONDS + compilations * COMPILE_SECONDS, 8)
        minimum = Duration(START_SECONDS + min(1, compilations) * COMPILE_SECONDS, 4)
        return Part(name, [*command, *options], limit, minimum, budgeted=True)

    measured = [
        ours(programs, "ours, capped", *in_full, f"runtime.memory_limit={MEMORY_LIMIT}"),
        of_torch("torch.compile, capped", 2, compiled, "2,1", "--memory-limit", MEMORY_LIMIT),
        ours(programs, "ours", *in_full),
        of_torch("torch.compile", 2, compiled, "16,8"),
    ]
    eager = [
        of_torch("torch eager, capped", 0, torch, "--mode", "eager", "--memory-limit", MEMORY_LIMIT),
        of_torch("torch eager", 0, torch, "--mode", "eager"),
    ]
    return [*measured, *eager, *measured]


def selected(text: str) -> list[str]:
    """Return the names of --only, in the order of the sections."""
    names = [name.strip() for name in text.split(",")]
    known = [section.name for section in sections(Programs("", "", Path(), Path()))]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no section {unknown[0]!r}: there are {', '.join(known)}")
    return [name for name in known if name in names]


def library_path(python: str) -> str:
    """Return LD_LIBRARY_PATH with the CUDA libraries of the Python environment, which the loader does not search.

    The interpreter is asked for its packages: in a virtual environment it may be a link to one with other packages.
    """
    code = (
        "import importlib.util, json; found = importlib.util.find_spec('nvidia'); "
        "print(json.dumps(list(found.submodule_search_locations or []) if found else []))"
    )
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        package_folders = json.loads(answer)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"--python {python} does not say where its packages are: {error}")
    folders = [str(folder) for package in package_folders for folder in sorted(Path(package).glob("*/lib"))]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def unpack(program: Path, folder: Path) -> str:
    """Return the path of the program, decompressed into `folder` if it is gzipped."""
    if program.suffix != ".gz":
        return str(program.resolve())
    path = folder / "transformer-candle"
    with gzip.open(program) as compressed, path.open("wb") as output:
        shutil.copyfileobj(compressed, output)
    path.chmod(0o755)
    return str(path)


def gpu_id() -> str:
    """Return the GPU that programs take, as nvidia-smi knows it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def ask_gpu(query: str) -> str:
    """Return what nvidia-smi says about the GPU, without a CUDA context."""
    command = ["nvidia-smi", f"--id={gpu_id()}", f"--query-gpu={query}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=QUERY_SECONDS)
        return answer.stdout.strip()
    return "no nvidia-smi"


@contextlib.contextmanager
def clocks_logged(log: Path) -> Iterator[None]:
    """Log clocks and power while the block runs, where there is an nvidia-smi."""
    query = [f"--id={gpu_id()}", f"--query-gpu={CLOCK_QUERY}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *query, f"--loop-ms={CLOCK_MILLISECONDS}"]
    with log.open("w") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=QUERY_SECONDS)


@dataclass
class Session:
    """Runs sections and writes their results."""

    out: Path
    end: float
    environment: dict[str, str]
    facts: dict[str, str]
    measured: Measured = field(default_factory=Measured)
    outcomes: list[PartResult] = field(default_factory=list)

    def run_section(self, section: Section, program: str) -> None:
        """Run the parts of a section within its budget and, after a failed check, compute-sanitizer."""
        end = self.end if section.budget is None else min(self.end, time.monotonic() + section.budget)
        with clocks_logged(self.out / f"clocks-{section.name}.csv"):
            for part in section.parts:
                self.run_part(part, end)
            if section.name == "check":
                repeated = sanitizer(program, self.outcomes)
                if isinstance(repeated, Part):
                    self.run_part(repeated, end)
                elif repeated:
                    self.add(repeated)

    def run_part(self, part: Part, end: float) -> None:
        """Run a part in the time that is left, and store its result."""
        self.add(run(part, self.measured, end - time.monotonic(), self.environment, self.out / "log.txt"))

    def add(self, outcome: PartResult) -> None:
        """Store an outcome and rewrite results.json."""
        self.outcomes.append(outcome)
        parts = [vars(outcome) for outcome in self.outcomes]
        (self.out / "results.json").write_text(json.dumps({**self.facts, "parts": parts}, indent=1) + "\n")

    def print_summary(self) -> None:
        """Print the table and the figures that decisions need, and write them to summary.txt."""
        lines = table(self.outcomes)
        print(lines, flush=True)
        figures = "\n".join(decisions(self.outcomes, self.out))
        print(figures, flush=True)
        (self.out / "summary.txt").write_text(f"{self.facts['gpu']}\n{lines}\n{figures}\n")


def stop(_number: int, _frame: object) -> None:
    """Leave the session in order: its processes are stopped, and its summary is printed."""
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_program = next((path for path in PROGRAMS if path.exists()), None)
    parser.add_argument(
        "--program",
        type=Path,
        default=default_program,
        required=default_program is None,
        help="transformer-candle(.gz)",
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter with PyTorch")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "rtx5090_1b.yaml")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="budget of the whole session")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", REPOSITORY / "target" / "gpu-session")))
    parser.add_argument(
        "--only", type=selected, metavar="SECTION[,SECTION...]",
        help="run these sections; default: all but compare",
    )  # fmt: skip
    arguments = parser.parse_args()

    end = time.monotonic() + arguments.seconds
    signal.signal(signal.SIGTERM, stop)
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path(arguments.python), "PYTHONUNBUFFERED": "1"}
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for former in ("log.txt", "summary.txt", *(path.name for path in out.glob("clocks-*.csv"))):
        (out / former).unlink(missing_ok=True)
    facts = {"gpu": ask_gpu(GPU_QUERY), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    print(facts["gpu"], flush=True)
    session = Session(out, end, environment, facts)
    with tempfile.TemporaryDirectory() as folder:
        trainer = unpack(arguments.program, Path(folder))
        programs = Programs(trainer, arguments.python, arguments.config, out)
        try:
            for section in sections(programs):
                if section.name in (arguments.only or {section.name} - ON_REQUEST):
                    session.run_section(section, trainer)
        finally:
            session.print_summary()


if __name__ == "__main__":
    main()
