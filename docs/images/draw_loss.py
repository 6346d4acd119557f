"""Draws the loss curves of a run as SVG, from the run directory's metrics.jsonl.

    python docs/images/draw_loss.py runs/demo --unigram-entropy 6.542 > docs/images/demo_loss.svg

Training loss and its running mean, held-out loss, and the learning rate below them. The colors are readable on light
and on dark backgrounds. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

Point = tuple[float, float]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT = 52, 24
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a; }
  .grid { stroke: #8c959f; stroke-opacity: 0.25; }
  .axis { stroke: #8c959f; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .train { stroke: #54aeff; } .smooth { stroke: #0969da; } .held { stroke: #bc4c00; } .rate { stroke: #1a7f37; }
  .faint { stroke-opacity: 0.55; stroke-width: 1.2; }
  .dot { fill: #bc4c00; }
  .unigram { stroke: #8c959f; stroke-dasharray: 5 4; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }
    .smooth { stroke: #4493f8; } .held { stroke: #f0883e; } .dot { fill: #f0883e; } .rate { stroke: #3fb950; }
  }
"""


@dataclass(frozen=True)
class Run:
    """The curves of a run, each a list of (step, value)."""

    training: list[Point]
    held_out: list[Point]
    learning_rate: list[Point]


@dataclass(frozen=True)
class Panel:
    """A rectangle of the picture, and the values at its edges."""

    top: float
    bottom: float
    last_step: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """The horizontal position of a step."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        """The vertical position of a value."""
        return self.bottom - (self.bottom - self.top) * (value - self.low) / (self.high - self.low)

    def line(self, points: list[Point], classes: str) -> str:
        """A line through points."""
        positions = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)
        return f'<polyline class="line {classes}" points="{positions}"/>'

    def level(self, value: float, classes: str) -> str:
        """A horizontal line across the panel."""
        height = f"{self.y(value):.1f}"
        return f'<line class="{classes}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>'


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def read(path: Path) -> Run:
    """Read the curves of `metrics.jsonl`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    return Run(
        training=[(row["step"], row["loss"]) for row in train],
        held_out=[(row["step"], row["loss"]) for row in evaluations],
        learning_rate=[(row["step"], row["learning_rate"]) for row in train],
    )


def running_mean(points: list[Point], width: int = 7) -> list[Point]:
    """The mean of up to `width` values around each point, fewer at the ends so that it stays centered."""
    smooth = []
    for index, (step, _) in enumerate(points):
        reach = min(width // 2, index, len(points) - 1 - index)
        around = points[index - reach : index + reach + 1]
        smooth.append((step, sum(value for _, value in around) / len(around)))
    return smooth


def ticks(low: float, high: float, at_most: int = 7) -> list[float]:
    """Round values from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def loss_panel(run: Run, last_step: float, unigram_entropy: float | None) -> list[str]:
    """Training and held-out loss over steps."""
    values = [value for _, value in run.training + run.held_out] + ([unigram_entropy] if unigram_entropy else [])
    panel = Panel(50, 290, last_step, math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2)
    parts = []
    for value in ticks(panel.low, panel.high):
        parts += [panel.level(value, "grid"), text(LEFT - 8, panel.y(value) + 4, f"{value:g}", "end")]
    if unigram_entropy:
        label = f"unigram entropy {unigram_entropy:.2f}"
        parts += [panel.level(unigram_entropy, "unigram")]
        parts += [text(WIDTH - RIGHT, panel.y(unigram_entropy) - 6, label, "end")]
    parts += [panel.line(run.training, "train faint"), panel.line(running_mean(run.training), "smooth")]
    parts += [panel.line(run.held_out, "held")]
    parts += [f'<circle class="dot" cx="{panel.x(s):.1f}" cy="{panel.y(v):.1f}" r="3.5"/>' for s, v in run.held_out]
    legend = [("smooth", "training loss, running mean"), ("train faint", "every logged step")]
    if run.held_out:
        legend.append(("held", f"held-out loss, {run.held_out[-1][1]:.2f} at step {run.held_out[-1][0]:,.0f}"))
    x = float(LEFT)
    for classes, label in legend:
        parts += [f'<path class="line {classes}" d="M{x:.0f} 18h22"/>', text(x + 28, 22, label)]
        x += 56 + 6.6 * len(label)
    return [*parts, text(WIDTH - RIGHT, 46, "nats per token", "end")]


def learning_rate_panel(run: Run, last_step: float) -> list[str]:
    """Learning rate over steps, with the axis of steps."""
    peak = max(value for _, value in run.learning_rate)
    panel = Panel(325, 385, last_step, 0.0, peak)
    parts = [panel.level(peak, "grid"), text(LEFT - 8, panel.y(peak) + 4, f"{peak:.0e}".replace("e-0", "e-"), "end")]
    parts += [panel.level(0.0, "axis"), text(LEFT - 8, panel.y(0.0) + 4, "0", "end")]
    parts += [panel.line(run.learning_rate, "rate"), text(WIDTH - RIGHT, panel.y(peak) - 6, "learning rate", "end")]
    for step in ticks(0, last_step, 6):
        parts.append(text(panel.x(step), 403, f"{step:,.0f}" if step else "step 0", "middle"))
    return parts


def draw(run: Run, unigram_entropy: float | None) -> str:
    """The picture."""
    last_step = run.training[-1][0]
    parts = [*loss_panel(run, last_step, unigram_entropy), *learning_rate_panel(run, last_step)]
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = f"<title>Loss and learning rate over {last_step:,.0f} steps</title>"
    return "\n".join([opening, title, f"<style>{STYLE}</style>", *parts, "</svg>"])


def main() -> None:
    """Print the picture of a run."""
    parser = argparse.ArgumentParser(description="Draw the loss curves of a run as SVG.")
    parser.add_argument("run", type=Path, help="a run directory, such as runs/demo")
    parser.add_argument("--unigram-entropy", type=float, metavar="NATS", help="as orchestrate prints it after training")
    arguments = parser.parse_args()
    run = read(arguments.run / "metrics.jsonl")
    if not run.training:
        parser.error(f"{arguments.run} has logged no training step yet")
    print(draw(run, arguments.unigram_entropy))


if __name__ == "__main__":
    main()
