"""The host: processor, memory, disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import shown
from orchestrator.screen import amount

CHECKPOINT_OF_1B = 15_825_985_536
"""Bytes of a checkpoint of 1.3 B parameters."""
LITTLE_FREE = 4 << 30
MUCH_SWAPPED = 1 << 30
SLOW_SAVE = 120
"""Seconds for a checkpoint of 1.3 B parameters above which a disk is reported as slow."""
_PROBE_BYTES = 8 << 20


def machine(built: dict[str, Any]) -> Finding:
    """Describe processor, memory and system."""
    memory = f"{amount(built['memory_bytes'])} of memory" if built["memory_bytes"] else "memory of unknown size"
    vectors = ", ".join(built["instructions"]) or "no vector instructions that are used"
    units = f"{built['cores']} cores ({vectors}; bf16 matmuls with {built['bf16_units']})"
    text = f"{built['processor'] or built['target']}, {units}, {memory}; {built['system']}"
    facts = {
        name: built[name] for name in ("processor", "instructions", "bf16_units", "cores", "memory_bytes", "system")
    }
    return Finding("machine", Verdict.GOOD, text, facts)


def governor(cpus: Path = Path("/sys/devices/system/cpu")) -> list[Finding]:
    """Check the CPU frequency governor; empty if the system has none, as in many virtual machines."""
    governors = sorted({path.read_text().strip() for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")})
    if not governors:
        return []
    facts = {"governors": governors}
    text = f"the processor's clocks are set by {', '.join(governors)}"
    if "powersave" in governors or "conservative" in governors:
        way_out = "`sudo cpupower frequency-set -g performance` keeps them high: the loader and CPU training need them"
        return [Finding("governor", Verdict.REMARK, f"{text}: {way_out}", facts)]
    return [Finding("governor", Verdict.GOOD, text, facts)]


def memory(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    """Check free memory and swap."""
    if not meminfo.exists():
        return []
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in meminfo.read_text().splitlines())
    }
    free, swapped = sizes["MemAvailable"], sizes["SwapTotal"] - sizes["SwapFree"]
    facts = {"free_bytes": free, "swapped_bytes": swapped}
    remark = ""
    if swapped > MUCH_SWAPPED:
        remark = f", and {amount(swapped)} of other programs is on disk (swap): end what is not needed"
    elif free < LITTLE_FREE:
        remark = ": end what is not needed: saving and reading data take memory besides the model"
    verdict = Verdict.REMARK if remark else Verdict.GOOD
    return [Finding("memory", verdict, f"{amount(free)} of memory free{remark}", facts)]


def disk(runs: Path) -> Finding:
    """Check the free space for runs, and the speed of writing a checkpoint."""
    folder = runs.absolute()
    while not folder.exists():
        folder = folder.parent
    way_out = "name another folder in ORCHESTRATE_RUNS_ROOT or --run-dir"
    try:
        free = shutil.disk_usage(folder).free
        rate = _written_and_synced(folder)
    except OSError as error:
        text = f"cannot write below {shown(runs)}: {error.strerror}; {way_out}"
        return Finding("disk", Verdict.BAD, text, {"runs": shown(runs)})
    text = f"{shown(runs)}: {amount(free)} free, {amount(int(rate))}/s written and synced"
    facts = {"runs": shown(runs), "free_bytes": free, "bytes_per_second": rate}
    remarks = []
    if free < 2 * CHECKPOINT_OF_1B:
        remarks.append(f"a checkpoint of 1.3 B parameters takes {amount(CHECKPOINT_OF_1B)}")
    if (seconds := CHECKPOINT_OF_1B / rate) > SLOW_SAVE:
        remarks.append(f"a checkpoint of 1.3 B parameters takes {seconds:,.0f} s; a local SSD saves it sooner")
    return Finding("disk", Verdict.REMARK if remarks else Verdict.GOOD, "; ".join([text, *remarks]), facts)


def _written_and_synced(folder: Path) -> float:
    """Write and sync a file as a checkpoint is written, and return bytes per second."""
    content = os.urandom(_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        file.seek(0)
        if file.read() != content:
            raise OSError(0, "what was read back is not what was written")
    return _PROBE_BYTES / seconds
