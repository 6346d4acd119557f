"""Prints what `plan --ranks` predicts for several GPUs and machines: the tables of docs/decisions/026.

python benches/gpu/scaling.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import _native

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "1b.yaml"
MODELS = {
    "1b": (),
    "3b": (
        "model.hidden_size=3072",
        "model.intermediate_size=8192",
        "model.num_layers=28",
        "model.num_attention_heads=24",
        "model.head_dim=128",
    ),
}
"""Overrides of the preset 1b by model: none, and those that give it the sizes of Llama 3.2 3B."""


@dataclass(frozen=True)
class Machines:
    """GPUs of one kind, and the network between their machines."""

    gpu: str
    ranks: int
    nodes: int = 1
    interconnect: str | None = None
    sequences: int = 256

    def words(self) -> list[str]:
        """Return the options of `plan`."""
        words = [f"--gpu={self.gpu}"]
        words += [f"--ranks={self.ranks}"] if self.ranks > 1 else []
        words += [f"--nodes={self.nodes}", f"--interconnect={self.interconnect}"] if self.interconnect else []
        return words + ([f"--override=data.sequences_per_step={self.sequences}"] if self.sequences != 256 else [])

    def name(self) -> str:
        """Return the row's name."""
        network = f", {self.interconnect} per machine" if self.interconnect else ""
        return f"{self.ranks} x {self.gpu}{network}"


ROWS = (
    *(Machines("rtx5090", ranks) for ranks in (1, 2, 4, 8)),
    *(Machines("h100", ranks) for ranks in (1, 8)),
    Machines("h100", 64, 8, "400Gb/s"),
    Machines("h100", 64, 8, "400Gb/s", 2048),
    Machines("h100", 64, 8, "3200Gb/s"),
)


def planned(model: str, machines: Machines) -> dict[str, Any]:
    """Return the plan of a model on these machines."""
    overrides = [f"--override={override}" for override in MODELS[model]]
    lines: list[str] = []
    words = ["plan", f"--config={CONFIG}", "--json", *overrides, *machines.words()]
    assert _native.run_command(words, lines.append, False) == 0
    return dict(json.loads("".join(lines)))


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def table(model: str) -> str:
    """Return the table of a model, in Markdown."""
    lines = [
        "| | sequences per step | memory | tokens/s | efficiency | exchange, ms | beside no computation, ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for machines in ROWS:
        plan = planned(model, machines)
        memory = f"{plan['bytes'] / 1e9:.1f} GB, micro-batch {plan['micro_batch']}"
        cells = [machines.name(), f"{machines.sequences:,}", memory]
        if plan["shortage"] is not None:
            cells += ["does not fit", "", "", ""]
        else:
            speed = plan["speed"]
            cells.append(_rates(speed["tokens_per_second"]))
            exchange = speed.get("exchange")
            cells += ["", "", ""] if exchange is None else _exchange(exchange)
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def _rates(rates: list[float]) -> str:
    return _range(*(f"{float(f'{rate:.3g}'):,.0f}" for rate in rates))


def _exchange(exchange: dict[str, Any]) -> list[str]:
    low, high = sorted(exchange["efficiency"])
    efficiency = f"{_range(f'{100 * low:.0f}', f'{100 * high:.0f}')} %"
    return [efficiency, *(_milliseconds(exchange[key]) for key in ("seconds", "exposed_seconds"))]


def _milliseconds(seconds: list[float]) -> str:
    slow, fast = (f"{1e3 * end:,.0f}" for end in seconds)
    return _range(fast, slow)


if __name__ == "__main__":
    for model in MODELS:
        print(f"{model}:\n\n{table(model)}\n")
