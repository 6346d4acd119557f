"""Checks and benchmarks a GPU within eight minutes: `benches/gpu/session.sh [OPTIONS]`.

First compares the GPU with the CPU, by the parts of `gpu-check`. Then benchmarks `configs/rtx5090_1b.yaml` in this
project and in PyTorch, with the memory of an RTX 5090 and with all that the GPU has, and once more while time is left.
Every part is a process with its own time limit, sized by the last measured optimizer step; a part that fails does not
affect the others. After a failed check compute-sanitizer, where installed, repeats it at small sizes. A table is
printed at the end; results.json and log.txt in --out are up to date after every part.

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
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
PROGRAMS = (TARGET / "cuda" / "release" / "transformer-candle", TARGET / "cuda" / "transformer-candle.gz")
GPU_QUERY = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit"
# What CUDA reports on an RTX 5090. nvidia-smi reports 32,607 MiB, of which 485 are never available to a program.
MEMORY_LIMIT = "32122MiB"

# Assumed durations. Start-up: opening the GPU, initialising weights and timing algorithms, or importing PyTorch.
START_SECONDS = 30.0
# torch.compile of the model for one micro-batch size.
COMPILE_SECONDS = 75.0
# An optimizer step of 1.1 PFLOP, until one has been measured.
ASSUMED_STEP_SECONDS = 10.0
# Shutdown of a command after its budget, besides the step in progress.
GRACE_SECONDS = 15.0
# The parts of gpu-check in order, with their time limits.
CHECK_SECONDS = {"training": 60.0, "gradients": 90.0, "operations": 150.0, "memory": 120.0}
SANITIZER = "compute-sanitizer"
SANITIZER_SECONDS = 120.0
# Exit code of compute-sanitizer if it reports an error.
SANITIZER_EXIT_CODE = "86"


@dataclass(frozen=True)
class Duration:
    """A fixed number of seconds plus a number of optimizer steps."""

    seconds: float
    steps: int = 0

    def to_seconds(self, step: float) -> float:
        """Return the duration in seconds, if a step takes `step` seconds."""
        return self.seconds + self.steps * step


@dataclass(frozen=True)
class Part:
    """A command that prints lines of JSON, the last of which is its result."""

    name: str
    command: list[str]
    limit: Duration
    # Not started if less time than this is left.
    minimum: Duration = Duration(GRACE_SECONDS)
    # Whether the command accepts its budget as --seconds, and exits by itself.
    budgeted: bool = False


@dataclass
class Measured:
    """Measurements of the parts so far, by which later parts are sized."""

    # Seconds per optimizer step.
    step: float = ASSUMED_STEP_SECONDS
    # Nominal FLOPs per second of the GPU, as our program reports them.
    peak_flops: float | None = None


@dataclass
class PartResult:
    """Result of a part, as results.json stores it."""

    part: str
    # None if it was not run.
    seconds: float | None
    failure: str | None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the part was run and failed."""
        return self.seconds is not None and (self.failure is not None or self.result.get("passed") is False)


def checks(program: str, only: list[str]) -> list[Part]:
    """Return the parts of gpu-check, each in a process of its own so that a crash loses one part only."""
    command = [program, "gpu-check", "--device", "cuda", "--json", "--only"]
    parts = [Part(f"gpu-check {part}", [*command, part], Duration(seconds)) for part, seconds in CHECK_SECONDS.items()]
    return [part for part in parts if is_selected(part.name, only)]


def sanitizer(program: str, outcomes: list[PartResult]) -> Part | PartResult | None:
    """Return the part that repeats failed checks under compute-sanitizer, or why there is none; None if all passed."""
    failed = [outcome.part.removeprefix("gpu-check ") for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    path = installed_sanitizer()
    if path is None:
        return PartResult(SANITIZER, None, "not installed: it is part of a CUDA toolkit")
    only = [word for part in failed for word in ("--only", part)]
    command = [program, "gpu-check", "--device", "cuda", "--size", "small", "--json", *only]
    return Part(SANITIZER, [path, "--error-exitcode", SANITIZER_EXIT_CODE, *command], Duration(SANITIZER_SECONDS))


def installed_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, on PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(SANITIZER, path=os.pathsep.join(folders))


def measurements(program: str, python: str, config: Path, only: list[str]) -> list[Part]:
    """Return the benchmarks in order; the comparison of ours with torch.compile is repeated at the end."""
    ours = [program, "bench", "--json", "--config", str(config), "--device", "cuda", "--steps", "6"]
    torch = [python, str(HERE / "torch_llama.py"), "--config", str(config), "--device", "cuda"]
    compiled = [*torch, "--mode", "compile", "--micro-batch"]

    def of_ours(name: str, *options: str) -> Part:
        # One warm-up step, six measured, and two timed operation by operation.
        return Part(name, [*ours, *options], Duration(START_SECONDS, 9), Duration(START_SECONDS, 3), budgeted=True)

    def of_torch(name: str, compilations: int, command: list[str], *options: str) -> Part:
        # Four micro-batches of each size tried; then one warm-up step and four measured.
        limit = Duration(START_SECONDS + compilations * COMPILE_SECONDS, 8)
        minimum = Duration(START_SECONDS + min(1, compilations) * COMPILE_SECONDS, 4)
        return Part(name, [*command, *options], limit, minimum, budgeted=True)

    measured = [
        of_ours("ours, capped", "--override", f"runtime.memory_limit={MEMORY_LIMIT}"),
        of_torch("torch.compile, capped", 2, compiled, "2,1", "--memory-limit", MEMORY_LIMIT),
        of_ours("ours"),
        of_torch("torch.compile", 2, compiled, "16,8"),
    ]
    eager = [
        of_torch("torch eager, capped", 0, torch, "--mode", "eager", "--memory-limit", MEMORY_LIMIT),
        of_torch("torch eager", 0, torch, "--mode", "eager"),
    ]
    return [part for part in [*measured, *eager, *measured] if is_selected(part.name, only)]


def is_selected(name: str, only: list[str]) -> bool:
    """Whether --only selects a part; `gpu-check` selects all of its parts."""
    return not only or name in only or ("gpu-check" in only and name.startswith("gpu-check "))


def fit_to_budget(part: Part, measured: Measured, remaining: float) -> tuple[list[str], float] | None:
    """Return the command with its budget, and its time limit in seconds; None if too little time is left."""
    if remaining < part.minimum.to_seconds(measured.step):
        return None
    limit = part.limit.to_seconds(measured.step)
    if not part.budgeted:
        return part.command, min(limit, remaining)
    command = [*part.command, "--seconds", f"{max(1.0, min(limit, remaining - GRACE_SECONDS)):.0f}"]
    if measured.peak_flops and part.name.startswith("torch"):
        command += ["--peak", f"{measured.peak_flops:.0f}"]
    return command, min(limit + GRACE_SECONDS + measured.step, remaining)


def update_measured(measured: Measured, result: dict[str, Any]) -> None:
    """Take from a result the measurements that size later parts."""
    if result.get("tokens_per_second") and result.get("tokens_per_step"):
        measured.step = result["tokens_per_step"] / result["tokens_per_second"]
    measured.peak_flops = result.get("nominal_flops_per_second") or measured.peak_flops


def run(part: Part, measured: Measured, remaining: float, environment: dict[str, str], log: Path) -> PartResult:
    """Run a part if time is left for it. Its result is the last line of its output that is a JSON object."""
    fitted = fit_to_budget(part, measured, remaining)
    if fitted is None:
        minimum = part.minimum.to_seconds(measured.step)
        return PartResult(
            part.name, None, f"no time left: it needs {minimum:.0f} s, and there are {max(remaining, 0):.0f}"
        )
    command, seconds = fitted
    print(f"{part.name} ...", flush=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        before = output.tell()
        begin = time.monotonic()
        failure = run_command(command, seconds, environment, output)
        took = time.monotonic() - begin
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    result: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            found_in_line = json.loads(line)
            result = found_in_line if isinstance(found_in_line, dict) else result
    if failure and lines:
        failure = f"{failure}: {failure_reason(lines[-1])[:100]}"
    elif not failure and not result:
        failure = "printed no result"
    update_measured(measured, result)
    return PartResult(part.name, round(took, 1), failure, result)


def failure_reason(line: str) -> str:
    """Return the last line of a failed part, or the first failed row if that line is a report of gpu-check."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        failed = next((row for row in json.loads(line)["rows"] if row["failure"]), None)
        return f"{failed['check']}: {failed['failure']}" if failed else line
    return line


def run_command(command: list[str], seconds: float, environment: dict[str, str], output: IO[str]) -> str | None:
    """Run a command with a time limit; return how it failed, None if it did not."""
    try:
        # In its own process group, so that compilers started by PyTorch are killed with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    except OSError as error:
        return f"cannot be started: {error}"
    try:
        code = process.wait(timeout=seconds)
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {seconds:.0f} s"


def table(outcomes: list[PartResult]) -> str:
    """Return a line per part, and the ratio of our tokens/s to torch.compile's within each round."""
    lines = [f"{'part':24}{'tokens/s':>10}{'MFU':>8}{'micro-batch':>13}{'memory GB':>11}{'seconds':>9}"]
    for outcome in outcomes:
        result = outcome.result
        memory = result.get("peak_memory_bytes") or result.get("memory_bytes")
        cells = [
            f"{result['tokens_per_second']:,.0f}" if "tokens_per_second" in result else "",
            f"{result['mfu']:.1%}" if result.get("mfu") else "",
            str(result.get("micro_batch", "")),
            f"{memory / 1e9:.1f}" if memory else "",
            f"{outcome.seconds:.0f}" if outcome.seconds is not None else "",
        ]
        widths = (10, 8, 13, 11, 9)
        line = f"{outcome.part:24}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        if "passed" in result:
            line += "   passed" if result["passed"] else "   FAILED"
        lines.append(line + (f"   {outcome.failure}" if outcome.failure else ""))
    return "\n".join([*lines, *ratios(outcomes)])


def ratios(outcomes: list[PartResult]) -> list[str]:
    """Return the median ratio over the rounds, with and without the memory limit."""
    speeds: dict[str, list[float]] = {}
    for outcome in outcomes:
        if "tokens_per_second" in outcome.result and not outcome.failure:
            speeds.setdefault(outcome.part, []).append(outcome.result["tokens_per_second"])
    lines = []
    for suffix in (", capped", ""):
        rounds = zip(speeds.get(f"ours{suffix}", []), speeds.get(f"torch.compile{suffix}", []), strict=False)
        values = [ours / theirs for ours, theirs in rounds]
        if values:
            lines.append(f"ours / torch.compile{suffix}: {statistics.median(values):.3f} (rounds: {len(values)})")
    return lines


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


def describe_gpu() -> str:
    """Return name, driver, memory and clocks by nvidia-smi, without a CUDA context."""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return "no nvidia-smi"


@dataclass
class Session:
    """Runs parts and writes their results."""

    out: Path
    end: float
    environment: dict[str, str]
    facts: dict[str, str]
    measured: Measured = field(default_factory=Measured)
    outcomes: list[PartResult] = field(default_factory=list)

    def run_part(self, part: Part) -> None:
        """Run a part in the time that is left, and store its result."""
        remaining = self.end - time.monotonic()
        self.add(run(part, self.measured, remaining, self.environment, self.out / "log.txt"))

    def add(self, outcome: PartResult) -> None:
        """Store an outcome and rewrite results.json."""
        self.outcomes.append(outcome)
        parts = [vars(outcome) for outcome in self.outcomes]
        (self.out / "results.json").write_text(json.dumps({**self.facts, "parts": parts}, indent=1) + "\n")

    def check(self, program: str, only: list[str]) -> None:
        """Run the parts of gpu-check and, after a failure, compute-sanitizer."""
        for part in checks(program, only):
            self.run_part(part)
        repeated = sanitizer(program, self.outcomes)
        if isinstance(repeated, Part):
            self.run_part(repeated)
        elif repeated:
            self.add(repeated)


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
    parser.add_argument("--seconds", type=float, default=460, help="budget of the whole session")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", REPOSITORY / "target" / "gpu-session")))
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help="run this part only (repeatable); `gpu-check` is all of its parts",
    )
    arguments = parser.parse_args()

    end = time.monotonic() + arguments.seconds
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path(arguments.python), "PYTHONUNBUFFERED": "1"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "log.txt").unlink(missing_ok=True)
    facts = {"gpu": describe_gpu(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    print(facts["gpu"], flush=True)
    session = Session(arguments.out, end, environment, facts)
    with tempfile.TemporaryDirectory() as folder:
        program = unpack(arguments.program, Path(folder))
        session.check(program, arguments.only)
        for part in measurements(program, arguments.python, arguments.config, arguments.only):
            session.run_part(part)
    print(table(session.outcomes))


if __name__ == "__main__":
    main()
