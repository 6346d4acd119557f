"""Prints the tables of what `run.py` measured once more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import median

from contenders import DTYPES, GENERATION, OPERATIONS, OURS, PEERS, TARGET, Row

ROWS = TARGET / "bench-cpu.jsonl"
"""The file that `run.py` writes the measurements to by default."""


class Round(list[Row]):
    """The rows that one round measured for one shape."""

    def select(self, field: str, **values: str) -> list[Row]:
        """Return the rows that have a field, and these values of others."""
        return [row for row in self if field in row and all(row[name] == value for name, value in values.items())]

    def speed(self, contender: str) -> float:
        """Return the tokens per second of training."""
        return float(self.select("tokens_per_second", contender=contender)[0]["tokens_per_second"])

    def peak(self, contender: str) -> float:
        """Return the peak resident memory in mebibytes."""
        return float(self.select("peak_mebibytes", contender=contender)[0]["peak_mebibytes"])

    def generated(self, contender: str, dtype: str) -> float:
        """Return the tokens per second of generation."""
        return float(self.select("generated_per_second", contender=contender, dtype=dtype)[0]["generated_per_second"])

    def weights(self, dtype: str) -> int:
        """Return the bytes of weights that generating a token reads."""
        return int(self.select("weight_bytes_per_token", dtype=dtype)[0]["weight_bytes_per_token"])

    def read(self) -> float:
        """Return the GB/s that the machine reads from its memory."""
        bandwidths = self.select("machine")[0]["machine"]["bandwidths"]
        return float(bandwidths[-1]["read_gigabytes_per_second"])

    def parts(self, contender: str) -> dict[str, float]:
        """Return the milliseconds of our step and of its parts."""
        return dict(self.select("tokens_per_second", contender=contender)[0]["milliseconds"])

    def milliseconds(self, contender: str, **operation: str) -> float:
        """Return the milliseconds of an operation, of the faster where it was measured both eager and compiled."""
        return min(float(row["milliseconds"]) for row in self.select("operation", contender=contender, **operation))

    def limits(self, dtype: str) -> tuple[float, float, float]:
        """Return a step's milliseconds: its operations as timed; at their limits with bytes from memory; from caches.

        An operation's limit is the longer of two times: of its FLOPs, at the best rate that any contender reached in
        an operation of this shape, and of its bytes.
        """
        ours = self.select("per_step", dtype=dtype)
        flops = {row["operation"]: row["flops"] for row in ours}
        timed = [row for row in self.select("operation", dtype=dtype) if row["operation"] in flops]
        rate = max(flops[row["operation"]] / row["milliseconds"] for row in timed)

        def total(milliseconds: Iterable[float]) -> float:
            return float(sum(row["per_step"] * time for row, time in zip(ours, milliseconds, strict=True)))

        def bound(source: str) -> float:
            return total(max(row["flops"] / rate, row[f"{source}_milliseconds"]) for row in ours)

        return total(row["milliseconds"] for row in ours), bound("memory"), bound("cache")


def report(rows: list[Row]) -> str:
    """Return the tables of every shape: steps against PyTorch's, the parts of ours, and single operations."""
    lines: list[str] = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        numbered: dict[int, Round] = {}
        for row in rows:
            if row["shape"] == shape:
                numbered.setdefault(row["round"], Round()).append(row)
        rounds = list(numbered.values())
        stepped, operated = (rounds[0].select(field) for field in ("tokens_per_second", "operation"))
        if stepped:
            lines += ["", *steps(shape, rounds)]
        for contender, dtype in DTYPES.items():
            lines += ["", *where(contender, rounds)] if stepped else []
            lines += limits(contender, dtype, rounds) if stepped and operated else []
        if rounds[0].select("generated_per_second"):
            lines += ["", *generation(shape, rounds)]
        if operated:
            lines += ["", *machine(rounds)]
            for dtype in DTYPES.values():
                lines += ["", *operations(shape, dtype, rounds)]
    return "\n".join(lines)


def steps(shape: str, rounds: list[Round]) -> Iterator[str]:
    yield f"{shape + ', training':<30}{'tokens/s':>10}{'peak MiB':>10}{'speed of ours / its':>22}"
    for contender in [*OURS, *PEERS]:
        speed, peak = median(it.speed(contender) for it in rounds), median(it.peak(contender) for it in rounds)
        line = f"    {contender:<26}{speed:>10.0f}{peak:>10.0f}"
        if contender in PEERS:
            ours = "ours-fp32" if "fp32" in contender else "ours-bf16"
            line += f"{median(it.speed(ours) / it.speed(contender) for it in rounds):>22.2f}"
        yield line


def generation(shape: str, rounds: list[Round]) -> Iterator[str]:
    """Yield tokens per second, and a token's time over the time in which its weights can be read from memory."""
    columns = f"{'tokens/s':>10}{'GB/s of weights':>18}{'x limit':>10}{'speed of ours / its':>22}"
    yield f"{shape + ', generating':<30}{columns}"
    for dtype, contender in product(DTYPES.values(), reversed(GENERATION)):
        speeds = [it.generated(contender, dtype) for it in rounds]
        rates = [speed * it.weights(dtype) / 1e9 for speed, it in zip(speeds, rounds, strict=True)]
        line = f"    {contender + ', ' + dtype:<26}{median(speeds):>10.0f}{median(rates):>18.1f}"
        over = "-"
        if rounds[0].select("machine"):
            over = f"{median(it.read() / rate for it, rate in zip(rounds, rates, strict=True)):.2f}"
        line += f"{over:>10}"
        if contender != "ours":
            line += f"{median(it.generated('ours', dtype) / it.generated(contender, dtype) for it in rounds):>22.2f}"
        yield line


def where(contender: str, rounds: list[Round]) -> Iterator[str]:
    """Yield the parts of our step, the largest first."""
    parts = {name: median(it.parts(contender)[name] for it in rounds) for name in rounds[0].parts(contender)}
    step = parts.pop("step")
    shares = sorted(((time / step, name) for name, time in parts.items()), reverse=True)
    yield f"{contender}, a step: {step:.1f} ms, {', '.join(f'{name} {share:.0%}' for share, name in shares)}"


def limits(contender: str, dtype: str, rounds: list[Round]) -> Iterator[str]:
    """Yield the time of our step beside its operations' measured alone, and beside theirs at the machine's limits."""
    names = (
        "its operations, measured one by one",
        "their limits: GEMMs at the best rate measured here, the rest at main memory's",
        "their limits, with the rest at the rate of the cache that can hold as many bytes",
    )
    steps = [it.parts(contender)["step"] for it in rounds]
    for name, sums in zip(names, zip(*(it.limits(dtype) for it in rounds), strict=True), strict=True):
        share = median(limit / step for limit, step in zip(sums, steps, strict=True))
        yield f"    {median(sums):8.1f} ms, {share:4.0%}: {name}"


def machine(rounds: list[Round]) -> Iterator[str]:
    """Yield the machine's limits, the best of all rounds."""
    machines = [row["machine"] for it in rounds for row in it.select("machine")]
    peaks = {unit: max(it[f"{unit}_gigaflops"] or 0 for it in machines) for unit in ("f32", "avx512_bf16", "amx_bf16")}
    rates = ", ".join(f"{unit} {peak:.0f} GFLOP/s" for unit, peak in peaks.items() if peak)
    yield f"the machine at its best, on {machines[0]['threads']} threads: {rates}; bf16 by {machines[0]['bf16_units']}"
    for sets in zip(*(it["bandwidths"] for it in machines), strict=True):
        ways = {way: max(it[f"{way}_gigabytes_per_second"] for it in sets) for way in ("read", "copy", "update")}
        rates = ", ".join(f"{way} {rate:.0f} GB/s" for way, rate in ways.items())
        yield f"    {sets[0]['working_set_bytes'] >> 20:4} MiB: {rates}"


def operations(shape: str, dtype: str, rounds: list[Round]) -> Iterator[str]:
    """Yield each operation of ours beside the faster of PyTorch's, eager or compiled.

    Rates above the peak are of operations whose operands stay in caches from call to call.
    """
    ours, *peers = OPERATIONS
    columns = (
        f"{'ms':>9}{'rate':>9}{'of peak':>15}{'torch ms':>11}{'unlocked':>10}{'speed / torch':>16}{'/ unlocked':>12}"
    )
    yield f"{shape + ', ' + dtype:<40}{columns}"
    for row in rounds[0].select("per_step", dtype=dtype):
        key = {"dtype": dtype, "operation": row["operation"]}
        ms, rate, peak = (
            median(it.select("per_step", **key)[0][field] for it in rounds)
            for field in ("milliseconds", "rate", "of_peak")
        )
        line = f"    {row['operation']:<36}{ms:>9.3f}{rate:>9.1f} {row['unit']:<8}{peak:>6.0%}"
        if rounds[0].select("operation", contender=peers[0], **key):
            theirs = [median(it.milliseconds(peer, **key) for it in rounds) for peer in peers]
            ratios = [
                median(it.milliseconds(peer, **key) / it.milliseconds(ours, **key) for it in rounds) for peer in peers
            ]
            line += f"{theirs[0]:>11.3f}{theirs[1]:>10.3f}{ratios[0]:>16.2f}{ratios[1]:>12.2f}"
        yield line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROWS, help="of measurements; %(default)s")
    file = parser.parse_args().file
    try:
        tables = report([json.loads(line) for line in file.read_text().splitlines()])
    except (OSError, ValueError, LookupError) as error:
        parser.error(f"{file} does not hold all measurements of a run: {error!r}")
    print(tables)
