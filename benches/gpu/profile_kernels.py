"""Profiles kernels of a training step with Nsight Compute, and prints a JSON line per kernel.

    python benches/gpu/profile_kernels.py --program target/cuda/release/transformer-candle

One launch of each kernel is profiled in `bench` of the config with one layer, whose shapes are those of the whole
model; a late launch, since the first ones may be those of tiles that the trainer times. Clocks are left as they are,
for they are as low in training. All that was measured is in --out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = ("attention_forward", "attention_backward_keys", "add_rms_norm_backward")
# Each kernel is launched 16 times or more per step, and at most 34 times to choose its tiles.
LAUNCH = 40
SECTIONS = (
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "WarpStateStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
)
ONE_LAYER = ("model.num_layers=1", "data.batch_size=4")
METRICS = {
    "Duration": "duration",
    "Compute (SM) Throughput": "sm_percent",
    "Memory Throughput": "memory_percent",
    "SM Frequency": "sm_frequency",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy_percent",
    "No Eligible": "no_eligible_warp_percent",
}
"""Metrics of the summary, by their names in Nsight Compute. Memory Throughput is a percentage and a rate."""


def find_tool(name: str) -> str | None:
    """Return the path of a CUDA tool, on PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(name, path=os.pathsep.join(folders))


def command(ncu: str, program: str, config: Path, log: Path, kernels: tuple[str, ...]) -> list[str]:
    """Return the command that profiles a launch of each kernel."""
    which = f"::regex:^({'|'.join(kernels)})$:{LAUNCH}"
    sections = [word for section in SECTIONS for word in ("--section", section)]
    overrides = [word for override in ONE_LAYER for word in ("--override", override)]
    profile = [ncu, "--clock-control", "none", "--kernel-id", which, *sections, "--csv", "--log-file", str(log)]
    bench = [program, "bench", "--config", str(config), "--device", "cuda", "--steps", "1", "--no-prediction"]
    return [*profile, *bench, *overrides]


def kernels_of(log: str) -> Iterator[dict[str, str]]:
    """Yield the metrics of each launch in a table of Nsight Compute, as numbers with their units."""
    table = [line for line in log.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(table):
        kernel = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
        name, unit = METRICS.get(row["Metric Name"] or ""), row["Metric Unit"]
        if name and (unit == "%" or not name.endswith("percent")):
            kernel[name] = f"{row['Metric Value']} {unit}".strip()
    yield from launches.values()


def main() -> int:
    """Run Nsight Compute."""
    parser = argparse.ArgumentParser(description="Profile kernels of a training step with Nsight Compute.")
    parser.add_argument("--program", required=True, help="transformer-candle, with CUDA")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "rtx5090_1b.yaml")
    parser.add_argument("--kernel", action="append", help="repeatable; default: attention and the norm's backward")
    parser.add_argument("--out", type=Path, default=Path("ncu.csv"), help="the table of all metrics")
    arguments = parser.parse_args()
    ncu = find_tool("ncu")
    if ncu is None:
        print("ncu is not installed: it is Nsight Compute, a part of a CUDA toolkit", file=sys.stderr)
        return 2
    arguments.out.unlink(missing_ok=True)
    kernels = tuple(arguments.kernel or KERNELS)
    code = subprocess.run(
        command(ncu, arguments.program, arguments.config, arguments.out, kernels), check=False
    ).returncode
    log = arguments.out.read_text(encoding="utf-8", errors="replace") if arguments.out.exists() else ""
    found = list(kernels_of(log))
    for kernel in found:
        print(json.dumps(kernel), flush=True)
    if missing := sorted(set(kernels) - {kernel["kernel"] for kernel in found}):
        last = next(
            (line for line in reversed(log.splitlines()) if line.startswith("==")), f"ncu's exit code is {code}"
        )
        print(f"not profiled: {', '.join(missing)} ({last})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
