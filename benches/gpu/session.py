"""Checks and measures a card within eight minutes: `benches/gpu/session.sh`, or with options of its own.

Compares the card with the CPU (`gpu-check`), then measures `configs/rtx5090_1b.yaml` here and in PyTorch, under the
memory of an RTX 5090 and with all that the card has, in turn and again while there is time. Every part has its own time
limit, and one that fails leaves the others alone. The table comes last; everything is in results.json and log.txt of
--out.

It needs a driver, PyTorch for this card, and a program that `make cuda` built, packed by gzip or not; neither a
compiler nor the package.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
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
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
PROGRAMS = (TARGET / "cuda" / "release" / "transformer-candle", TARGET / "cuda" / "transformer-candle.gz")
CARD_QUERY = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit"
CAP = "32607MiB"


@dataclass(frozen=True)
class Part:
    """A command that prints JSON lines, the last of which is its result."""

    name: str
    command: list[str]
    seconds: float


@dataclass
class Outcome:
    """What became of a part."""

    part: str
    seconds: float
    failure: str | None
    result: dict[str, Any] = field(default_factory=dict)


def parts(program: str, python: str, config: Path, only: list[str]) -> list[Part]:
    """In the order of running; the second half repeats what is compared."""
    ours = [program, "bench", "--config", str(config), "--steps", "6"]
    torch = [python, str(HERE / "torch_llama.py"), "--config", str(config)]
    compiled = [*torch, "--mode", "compile", "--micro-batch"]
    measured = [
        Part("ours, capped", [*ours, "--override", f"runtime.memory_limit={CAP}"], 60),
        Part("torch.compile, capped", [*compiled, "2,1", "--memory-limit", CAP], 120),
        Part("ours", ours, 60),
        Part("torch.compile", [*compiled, "16,8"], 120),
    ]
    eager = [
        Part("torch eager, capped", [*torch, "--mode", "eager", "--memory-limit", CAP], 60),
        Part("torch eager", [*torch, "--mode", "eager"], 60),
    ]
    check = Part("gpu-check", [program, "gpu-check", "--json"], 200)
    return [part for part in [check, *measured, *eager, *measured] if not only or part.name in only]


def run(part: Part, seconds: float, environment: dict[str, str], log: Path) -> Outcome:
    """Run a part for so long at most; its result is its last line that is a JSON object."""
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(part.command)}\n")
        output.flush()
        before = output.tell()
        begin = time.monotonic()
        # A process group of its own: compilers that PyTorch starts must not outlive it.
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            failure = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            failure = f"stopped after {seconds:.0f} s"
        took = time.monotonic() - begin
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    result: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            result = found if isinstance(found, dict) else result
    if failure and lines:
        failure = f"{failure}: {lines[-1][:100]}"
    elif not failure and not result:
        failure = "printed no result"
    return Outcome(part.name, round(took, 1), failure, result)


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
            f"{outcome.seconds:.0f}",
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
    """LD_LIBRARY_PATH with CUDA's libraries of the Python environment, which no loader searches by itself."""
    code = "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else []))"
    if Path(python).resolve() == Path(sys.executable).resolve():
        found = importlib.util.find_spec("nvidia")
        places = list(found.submodule_search_locations or []) if found else []
    else:
        places = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.split()
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


def card() -> str:
    """What nvidia-smi says of the card, without touching it."""
    command = ["nvidia-smi", f"--query-gpu={CARD_QUERY}", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return "no nvidia-smi"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = next((path for path in PROGRAMS if path.exists()), None)
    parser.add_argument("--program", type=Path, default=found, required=found is None, help="transformer-candle(.gz)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "rtx5090_1b.yaml")
    parser.add_argument("--seconds", type=float, default=460, help="for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", REPOSITORY / "target" / "gpu-session")))
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="repeatable")
    arguments = parser.parse_args()

    end = time.monotonic() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path(arguments.python), "PYTHONUNBUFFERED": "1"}
    facts = {"card": card(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    print(facts["card"], flush=True)
    outcomes: list[Outcome] = []
    log = arguments.out / "log.txt"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        program = unpacked(arguments.program, Path(folder))
        for part in parts(program, arguments.python, arguments.config, arguments.only):
            left = end - time.monotonic() - 5
            if left < min(15, part.seconds):
                outcomes.append(Outcome(part.name, 0, "no time left"))
                continue
            print(f"{part.name} ...", flush=True)
            outcomes.append(run(part, min(part.seconds, left), environment, log))
            rows = [vars(outcome) for outcome in outcomes]
            (arguments.out / "results.json").write_text(json.dumps({**facts, "parts": rows}, indent=1) + "\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
