"""Checks and measures a GPU within eight minutes: `benches/gpu/session.sh`, or with options of its own.

Compares the GPU with the CPU, one part of `gpu-check` after the other, then measures `configs/rtx5090_1b.yaml` here and
in PyTorch, under the memory of an RTX 5090 and with all that the GPU has, in turn and again while there is time. Every
part is a process with its own time limit, sized by the optimizer step as it was measured last, and one that fails
leaves the others alone. After a check that failed, compute-sanitizer repeats it at small sizes where it is installed.
The table comes last; everything is in results.json and log.txt of --out, which are up to date after every part.

It needs a driver, PyTorch for this GPU, and a program that `make cuda` built, packed by gzip or not; neither a
compiler nor the package.
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
# What CUDA reports of an RTX 5090. nvidia-smi says 32,607 MiB, of which a program never gets the last 485.
CAP = "32122MiB"

# Seconds, assumed: opening the GPU, making the weights and choosing algorithms, or importing PyTorch and opening it;
# torch.compile of the model for one micro-batch; a step of 1.1 PFLOP before one has been measured; what a command
# takes to end after its budget, besides the step that it has begun.
START, COMPILE, ASSUMED_STEP, GRACE = 30.0, 75.0, 10.0, 15.0
# The parts of gpu-check in their order, with the seconds each may take.
CHECKS = {"training": 60.0, "gradients": 90.0, "operations": 150.0, "memory": 120.0}
SANITIZER = "compute-sanitizer"
SANITIZER_SECONDS = 120.0
# Of the compute-sanitizer, where it found something.
SANITIZER_EXIT_CODE = "86"


@dataclass(frozen=True)
class Time:
    """How long a part takes: so many seconds, and so many optimizer steps."""

    seconds: float
    steps: int = 0

    def of(self, step: float) -> float:
        """In seconds, where a step takes `step`."""
        return self.seconds + self.steps * step


@dataclass(frozen=True)
class Part:
    """A command that prints JSON lines, the last of which is its result."""

    name: str
    command: list[str]
    most: Time
    # With less than this left it is not begun.
    least: Time = Time(GRACE)
    # Whether it takes its budget as --seconds, and ends by itself.
    budgeted: bool = False


@dataclass
class Known:
    """What the parts so far have measured."""

    # Seconds of an optimizer step.
    step: float = ASSUMED_STEP
    # The GPU's nominal FLOPs per second, as our program has them.
    peak: float | None = None


@dataclass
class Outcome:
    """What became of a part."""

    part: str
    # None where it was not run.
    seconds: float | None
    failure: str | None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it was run and something is wrong."""
        return self.seconds is not None and (self.failure is not None or self.result.get("passed") is False)


def checks(program: str, only: list[str]) -> list[Part]:
    """The parts of gpu-check, each in a process of its own: what one loses, the others keep."""
    command = [program, "gpu-check", "--device", "cuda", "--json", "--only"]
    found = [Part(f"gpu-check {part}", [*command, part], Time(seconds)) for part, seconds in CHECKS.items()]
    return [part for part in found if wanted(part.name, only)]


def sanitizer(program: str, outcomes: list[Outcome]) -> Part | Outcome | None:
    """What repeats the checks that failed under compute-sanitizer, or why nothing does; none where all passed."""
    failed = [outcome.part.removeprefix("gpu-check ") for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    found = installed_sanitizer()
    if found is None:
        return Outcome(SANITIZER, None, "not installed: it is part of a CUDA toolkit")
    only = [word for part in failed for word in ("--only", part)]
    command = [program, "gpu-check", "--device", "cuda", "--size", "small", "--json", *only]
    return Part(SANITIZER, [found, "--error-exitcode", SANITIZER_EXIT_CODE, *command], Time(SANITIZER_SECONDS))


def installed_sanitizer() -> str | None:
    """Where compute-sanitizer is: on PATH, or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(SANITIZER, path=os.pathsep.join(folders))


def measurements(program: str, python: str, config: Path, only: list[str]) -> list[Part]:
    """In the order of running; the second half repeats what is compared."""
    ours = [program, "bench", "--config", str(config), "--device", "cuda", "--steps", "6"]
    torch = [python, str(HERE / "torch_llama.py"), "--config", str(config), "--device", "cuda"]
    compiled = [*torch, "--mode", "compile", "--micro-batch"]

    def of_ours(name: str, *options: str) -> Part:
        # A step to warm up, those measured, and two operation by operation.
        return Part(name, [*ours, *options], Time(START, 9), Time(START, 3), budgeted=True)

    def of_torch(name: str, compilations: int, command: list[str], *options: str) -> Part:
        # Timing a micro-batch takes four of it; then a step to warm up, and four measured.
        most, least = Time(START + compilations * COMPILE, 8), Time(START + min(1, compilations) * COMPILE, 4)
        return Part(name, [*command, *options], most, least, budgeted=True)

    measured = [
        of_ours("ours, capped", "--override", f"runtime.memory_limit={CAP}"),
        of_torch("torch.compile, capped", 2, compiled, "2,1", "--memory-limit", CAP),
        of_ours("ours"),
        of_torch("torch.compile", 2, compiled, "16,8"),
    ]
    eager = [
        of_torch("torch eager, capped", 0, torch, "--mode", "eager", "--memory-limit", CAP),
        of_torch("torch eager", 0, torch, "--mode", "eager"),
    ]
    return [part for part in [*measured, *eager, *measured] if wanted(part.name, only)]


def wanted(name: str, only: list[str]) -> bool:
    """Whether a part is asked for; `gpu-check` stands for all of its parts."""
    return not only or name in only or ("gpu-check" in only and name.startswith("gpu-check "))


def sized(part: Part, known: Known, left: float) -> tuple[list[str], float] | None:
    """The command with its budget, and when it is stopped; none where too little time is left."""
    if left < part.least.of(known.step):
        return None
    most = part.most.of(known.step)
    if not part.budgeted:
        return part.command, min(most, left)
    command = [*part.command, "--seconds", f"{max(1.0, min(most, left - GRACE)):.0f}"]
    if known.peak and part.name.startswith("torch"):
        command += ["--peak", f"{known.peak:.0f}"]
    return command, min(most + GRACE + known.step, left)


def learn(known: Known, result: dict[str, Any]) -> None:
    """Keeps of a result what sizes the parts after it."""
    if result.get("tokens_per_second") and result.get("tokens_per_step"):
        known.step = result["tokens_per_step"] / result["tokens_per_second"]
    known.peak = result.get("nominal_flops_per_second") or known.peak


def run(part: Part, known: Known, left: float, environment: dict[str, str], log: Path) -> Outcome:
    """Runs a part if there is time for it; its result is its last line that is a JSON object."""
    found = sized(part, known, left)
    if found is None:
        needed = part.least.of(known.step)
        return Outcome(part.name, None, f"no time left: it needs {needed:.0f} s, and there are {max(left, 0):.0f}")
    command, seconds = found
    print(f"{part.name} ...", flush=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        before = output.tell()
        begin = time.monotonic()
        failure = failure_of(command, seconds, environment, output)
        took = time.monotonic() - begin
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    result: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            found_in_line = json.loads(line)
            result = found_in_line if isinstance(found_in_line, dict) else result
    if failure and lines:
        failure = f"{failure}: {reason(lines[-1])[:100]}"
    elif not failure and not result:
        failure = "printed no result"
    learn(known, result)
    return Outcome(part.name, round(took, 1), failure, result)


def reason(line: str) -> str:
    """The last line of a part that failed; of a report of gpu-check its first failed row."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        failed = next((row for row in json.loads(line)["rows"] if row["failure"]), None)
        return f"{failed['check']}: {failed['failure']}" if failed else line
    return line


def failure_of(command: list[str], seconds: float, environment: dict[str, str], output: IO[str]) -> str | None:
    """Runs a command for so long at most, and tells how it failed."""
    try:
        # A process group of its own: compilers that PyTorch starts must not outlive it.
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


def table(outcomes: list[Outcome]) -> str:
    """A line a part, and the ratio of ours to torch.compile's within each round."""
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


def ratios(outcomes: list[Outcome]) -> list[str]:
    speeds: dict[str, list[float]] = {}
    for outcome in outcomes:
        if "tokens_per_second" in outcome.result and not outcome.failure:
            speeds.setdefault(outcome.part, []).append(outcome.result["tokens_per_second"])
    lines = []
    for suffix in (", capped", ""):
        rounds = zip(speeds.get(f"ours{suffix}", []), speeds.get(f"torch.compile{suffix}", []), strict=False)
        found = [ours / theirs for ours, theirs in rounds]
        if found:
            lines.append(f"ours / torch.compile{suffix}: {statistics.median(found):.3f} (rounds: {len(found)})")
    return lines


def library_path(python: str) -> str:
    """LD_LIBRARY_PATH with CUDA's libraries of the Python environment, which no loader searches by itself.

    The interpreter itself says where its packages are: that of a virtual environment is a link to one with others.
    """
    code = (
        "import importlib.util, json; found = importlib.util.find_spec('nvidia'); "
        "print(json.dumps(list(found.submodule_search_locations or []) if found else []))"
    )
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        places = json.loads(answer)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"--python {python} does not say where its packages are: {error}")
    folders = [str(folder) for place in places for folder in sorted(Path(place).glob("*/lib"))]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def unpacked(program: Path, folder: Path) -> str:
    """The program, unpacked where it is compressed."""
    if program.suffix != ".gz":
        return str(program.resolve())
    path = folder / "transformer-candle"
    with gzip.open(program) as packed, path.open("wb") as whole:
        shutil.copyfileobj(packed, whole)
    path.chmod(0o755)
    return str(path)


def gpu() -> str:
    """What nvidia-smi says of the GPU, without touching it."""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return "no nvidia-smi"


@dataclass
class Session:
    """The parts so far, and where they are written down."""

    out: Path
    end: float
    environment: dict[str, str]
    facts: dict[str, str]
    known: Known = field(default_factory=Known)
    outcomes: list[Outcome] = field(default_factory=list)

    def do(self, part: Part) -> None:
        left = self.end - time.monotonic()
        self.add(run(part, self.known, left, self.environment, self.out / "log.txt"))

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome, and writes down all there are."""
        self.outcomes.append(outcome)
        parts = [vars(outcome) for outcome in self.outcomes]
        (self.out / "results.json").write_text(json.dumps({**self.facts, "parts": parts}, indent=1) + "\n")

    def check(self, program: str, only: list[str]) -> None:
        """The parts of gpu-check, and after a failure what looks for its cause."""
        for part in checks(program, only):
            self.do(part)
        cause = sanitizer(program, self.outcomes)
        if isinstance(cause, Part):
            self.do(cause)
        elif cause:
            self.add(cause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = next((path for path in PROGRAMS if path.exists()), None)
    parser.add_argument("--program", type=Path, default=found, required=found is None, help="transformer-candle(.gz)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "rtx5090_1b.yaml")
    parser.add_argument("--seconds", type=float, default=460, help="for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", REPOSITORY / "target" / "gpu-session")))
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="repeatable; `gpu-check` is all of its parts"
    )
    arguments = parser.parse_args()

    end = time.monotonic() + arguments.seconds
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path(arguments.python), "PYTHONUNBUFFERED": "1"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "log.txt").unlink(missing_ok=True)
    facts = {"gpu": gpu(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    print(facts["gpu"], flush=True)
    session = Session(arguments.out, end, environment, facts)
    with tempfile.TemporaryDirectory() as folder:
        program = unpacked(arguments.program, Path(folder))
        session.check(program, arguments.only)
        for part in measurements(program, arguments.python, arguments.config, arguments.only):
            session.do(part)
    print(table(session.outcomes))


if __name__ == "__main__":
    main()
