"""What a GPU session found: a line per part, then the figures that decisions need."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from session_parts import PartResult

Row = dict[str, Any]


def table(outcomes: list[PartResult]) -> str:
    """Return a line per part."""
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
    return "\n".join(lines)


def decisions(outcomes: list[PartResult], out: Path) -> list[str]:
    """Return the figures that decisions need, a line each; none of what was not measured."""
    rows = [row for outcome in outcomes for row in outcome.rows or [outcome.result]]
    return [
        *clock_lines(out),
        *profile_lines(rows),
        *attention_lines(rows),
        *gemm_lines([row for row in rows if "linear" in row]),
        *step_lines(outcomes),
        *rounds_lines(outcomes),
        *speed_lines(outcomes),
        *adapter_lines(outcomes),
    ]


def speeds(outcomes: list[PartResult]) -> dict[str, list[float]]:
    """Return the tokens per second of each part, in order; a part that was stopped may have measured some."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if "tokens_per_second" in outcome.result:
            found.setdefault(outcome.part, []).append(outcome.result["tokens_per_second"])
    return found


def step_lines(outcomes: list[PartResult]) -> Iterator[str]:
    """Yield the milliseconds of a step of ours and of its parts, the longest first."""
    for outcome in outcomes:
        times = outcome.result.get("milliseconds")
        if isinstance(times, dict) and "step" in times:
            step = times["step"]
            parts = [f"{part} {time:,.0f}" for part, time in sorted(times.items(), key=lambda item: -item[1])[1:]]
            yield f"{outcome.part}, ms of a step: {step:,.0f}" + (f" ({', '.join(parts)})" if parts else "")


def rounds_lines(outcomes: list[PartResult]) -> Iterator[str]:
    """Yield the median ratio over the rounds of `compare`, with and without the memory limit."""
    found = speeds([outcome for outcome in outcomes if not outcome.failure])
    for suffix in (", capped", ""):
        rounds = zip(found.get(f"ours{suffix}", []), found.get(f"torch.compile{suffix}", []), strict=False)
        values = [ours / theirs for ours, theirs in rounds]
        if values:
            yield f"ours / torch.compile{suffix}: {statistics.median(values):.3f} (rounds: {len(values)})"


def speed_lines(outcomes: list[PartResult]) -> Iterator[str]:
    """Yield the ratios of fp8 to bf16 and of ours to PyTorch's fastest, each a mean over its rounds."""
    means = {part: statistics.mean(values) for part, values in speeds(outcomes).items()}
    attention = {outcome.part: outcome.result["attention"] for outcome in outcomes if outcome.result.get("attention")}

    def ratio(above: str, below: str) -> Iterator[str]:
        if above in means and below in means:
            kernel = f" with {attention[below]}" if below in attention else ""
            figures = f"{means[above]:,.0f} and {means[below]:,.0f} tokens/s"
            yield f"{above} / {below}{kernel}: {means[above] / means[below]:.3f} ({figures})"

    yield from ratio("torch fp8", "torch bf16")
    yield from ratio("ours bf16", "torch bf16")
    yield from ratio("ours fp8", "torch fp8")
    yield from ratio("ours fp8", "ours bf16")
    sides = {
        side: max((f"{side} {one}" for one in ("bf16", "fp8") if f"{side} {one}" in means), key=means.__getitem__)
        for side in ("ours", "torch")
        if any(part.startswith(side) and part.endswith(("bf16", "fp8")) for part in means)
    }
    if len(sides) == 2:
        ours, torch = sides["ours"], sides["torch"]
        yield f"fastest of ours ({ours}) / fastest of PyTorch ({torch}): {means[ours] / means[torch]:.3f}"


def adapter_lines(outcomes: list[PartResult]) -> Iterator[str]:
    """Yield speed and memory of LoRA beside each kind of base, and its speed over peft's."""
    means = {part: statistics.mean(values) for part, values in speeds(outcomes).items()}
    for outcome in outcomes:
        if not outcome.part.startswith("LoRA ") or outcome.part not in means:
            continue
        line = f"{outcome.part}: {means[outcome.part]:,.0f} tokens/s"
        used, planned = (outcome.result.get(name) for name in ("memory_used_bytes", "memory_bytes"))
        if used and planned:
            line += f", {used / 1e9:.2f} GB used, {used / planned:.3f} of the plan"
        if "peft bf16" in means:
            line += f", {means[outcome.part] / means['peft bf16']:.2f} x peft"
        yield line


def gemm_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield per precision the time of a block's GEMMs for one micro-batch, and what more candidates are worth."""
    timed = [row for row in rows if row.get("milliseconds")]
    # As trained: gradients of weights are added to.
    trained = [row for row in timed if row["direction"] != "backward_weight" or row["beta"] == 1]
    wanted = {(row["linear"], row["direction"]) for row in rows}
    bf16 = fastest([row for row in trained if row["precision"] == "bf16"])
    for precision in dict.fromkeys(row["precision"] for row in rows):
        best = fastest([row for row in trained if row["precision"] == precision])
        common = best.keys() & bf16.keys()
        if not common:
            continue
        total, base = (sum(times[gemm]["milliseconds"] for gemm in common) for times in (best, bf16))
        flops = sum(2.0 * best[gemm]["m"] * best[gemm]["n"] * best[gemm]["k"] for gemm in common)
        line = f"GEMMs of a block, {precision}: {total:.2f} ms, {flops / total / 1e9:,.0f} TFLOP/s"
        line += f", {base / total:.2f} x bf16" if precision != "bf16" else ""
        yield line + (f" ({len(common)} of {len(wanted)} GEMMs)" if len(common) < len(wanted) else "")
    for name, what in (("best_of_16", "64 candidates instead of 16"), ("first", "64 candidates instead of the first")):
        searched = [row for row in timed if row.get(f"{name}_milliseconds")]
        if searched:
            gain = 1 - sum(row["milliseconds"] for row in searched) / sum(
                row[f"{name}_milliseconds"] for row in searched
            )
            yield f"GEMMs, {what}: {gain:.1%} less time"


def fastest(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Return the fastest row of each GEMM."""
    slowest_first = sorted(rows, key=lambda row: float(row["milliseconds"]), reverse=True)
    return {(row["linear"], row["direction"]): row for row in slowest_first}


def attention_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the milliseconds of attention forward and backward: the fastest of our tiles beside PyTorch's kernels."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("kernel") and row.get("milliseconds"):
            operation, size = row["kernel"], row.get("head_size")
            if not size:
                operation, _, size = row["kernel"].split(".")[:3]
            of_size = times.setdefault(str(size).removeprefix("e"), {})
            of_size[operation] = min(row["milliseconds"], of_size.get(operation, row["milliseconds"]))
    for size, found in times.items():
        sides = {
            "ours": ("attention_forward", ("attention_backward_queries", "attention_backward_keys")),
            "cudnn": ("pytorch cudnn forward", ("pytorch cudnn backward",)),
            "flash": ("pytorch flash forward", ("pytorch flash backward",)),
        }
        cells = [
            f"{side} {found[forward]:.3f} + {sum(map(found.__getitem__, backward)):.3f} ms"
            for side, (forward, backward) in sides.items()
            if found.keys() >= {forward, *backward}
        ]
        if cells:
            yield f"attention, heads of {size}, forward + backward: {', '.join(cells)}"


def profile_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line per profiled kernel."""
    for row in rows:
        if "duration" in row:
            metrics = [f"{name.removesuffix('_percent')} {value}" for name, value in row.items() if name != "kernel"]
            yield f"{row['kernel']}: {', '.join(metrics)}"


def clock_lines(out: Path) -> Iterator[str]:
    """Yield the median clock and power of each section, from what nvidia-smi logged meanwhile."""
    for log in sorted(out.glob("clocks-*.csv")):
        samples = []
        for fields in csv.reader(log.read_text(encoding="utf-8", errors="replace").splitlines()):
            try:
                samples.append([float(number) for number in fields[1:4]])
            except ValueError:  # "[N/A]", or a line that was cut off
                continue
        complete = [sample for sample in samples if len(sample) == 3]
        if complete:
            clock, power, temperature = (statistics.median(column) for column in zip(*complete, strict=True))
            section = log.stem.removeprefix("clocks-")
            figures = f"{clock:,.0f} MHz, {power:.0f} W, {temperature:.0f} C"
            yield f"{section}: {figures} (medians of {len(complete)} samples)"
