"""The rows of the quality bench: one training run each, by name.

Contenders are swept by learning rate; what the recipe's parts do is asked of the best one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

STEPS = 976
SEEDS = (21, 22, 23, 24, 25, 26)
"""The first is that of the sweeps, finalists are trained with three, winners with all. Others chose the recipes."""
FINALIST_SEEDS = 3
RATES = {"adamw": (5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3), "muon": (1e-3, 2e-3, 3e-3, 5e-3, 8e-3, 1.2e-2)}
"""Peak learning rates of the sweeps. Without the recipe 8e-3 was AdamW's worst of six, so 1.5e-3 is in its place."""

QK_NORM = "model.architecture=qwen3"
RECIPES = {
    "adamw": ("optimizer.embedding_learning_rate_scale=10", QK_NORM),
    "muon": (
        "optimizer.embedding_learning_rate_scale=15", QK_NORM, "model.init_std=0.01", "optimizer.muon.momentum=0.85",
    ),
}  # fmt: skip
"""What gains much with each optimizer. Muon's recipe also has a warm-up over 1 % of the steps instead of 5 %."""


@dataclass(frozen=True)
class Row:
    """A run: a config of this folder, and what the row changes in it."""

    name: str
    config: str
    overrides: tuple[str, ...]
    seed: int = SEEDS[0]

    def changed(self, suffix: str, *overrides: str) -> Row:
        """Return the run with further overrides, in place of its own of the same keys, and named with a suffix."""
        keys = {override.partition("=")[0] for override in overrides}
        remaining = [override for override in self.overrides if override.partition("=")[0] not in keys]
        return replace(self, name=f"{self.name}-{suffix}", overrides=(*remaining, *overrides))

    def seeds(self, count: int = FINALIST_SEEDS) -> list[Row]:
        """Return the run with the first seeds, and so other initial weights and another order of the data."""
        return [
            self if seed == self.seed else replace(self, name=f"{self.name}-seed{seed}", seed=seed)
            for seed in SEEDS[:count]
        ]

    def value(self, key: str, default: str = "") -> str:
        """Return what the row overrides a key with."""
        return next((text.partition("=")[2] for text in self.overrides if text.startswith(f"{key}=")), default)

    @property
    def steps(self) -> int:
        """The optimizer steps of the whole run."""
        return int(self.value("scheduler.total_steps", f"{STEPS}"))


def sweep(algorithm: str, config: str = "10m") -> list[Row]:
    """Return a row per learning rate, at one seed."""
    return [
        Row(
            f"{config}-{algorithm}-{rate:g}",
            config,
            (f"optimizer.algorithm={algorithm}", f"optimizer.learning_rate={rate:g}"),
        )
        for rate in RATES[algorithm]
    ]


def shortened(row: Row, name: str, steps: int) -> Row:
    """Return the run with fewer steps and the same share of them for warm-up and decay."""
    return row.changed(name, f"scheduler.total_steps={steps}", f"scheduler.warmup_steps={steps // 20}")


def with_recipe(row: Row) -> Row:
    """Return the run with every part of its optimizer's recipe."""
    algorithm = row.value("optimizer.algorithm")
    warmup = [f"scheduler.warmup_steps={row.steps // 100}"] * (algorithm == "muon")
    return row.changed("recipe", *RECIPES[algorithm], *warmup)


def contenders() -> dict[str, list[Row]]:
    """Return the sweeps by name: both optimizers with and without their recipes, Muon also on half of the tokens."""
    adamw, muon = sweep("adamw"), sweep("muon")
    return {
        "adamw-recipe": [with_recipe(row) for row in adamw],
        "muon-half-recipe": [with_recipe(shortened(row, "half", STEPS // 2)) for row in muon],
        "adamw": adamw,
        "muon-recipe": [with_recipe(row) for row in muon],
        "muon": muon,
    }


LARGER = ("adamw-recipe", "muon-half-recipe", "adamw")
"""Contenders whose best row is trained at 25 M too."""
VARIED = ("muon-half-recipe", "adamw-recipe")
"""Contenders from whose best row the recipe's parts are taken out one by one, and in which further keys are changed."""


def after_sweep(best: Mapping[str, Row]) -> list[Row]:
    """Return the rows that follow the sweeps, from the best row of each."""
    larger = [replace(best[name], name=best[name].name.replace("10m", "25m"), config="25m") for name in LARGER]
    variant_rows = [
        best[name].changed(suffix, *keys) for name in VARIED for suffix, keys in variants(best[name]).items()
    ]
    more_tokens = five_eighths(best["muon-half-recipe"])
    return [*larger, *(seed for row in [more_tokens, *variant_rows] for seed in row.seeds())]


def five_eighths(half: Row) -> Row:
    """Return a run on half of the tokens, with the recipe, on five eighths of them instead."""
    longer = with_recipe(shortened(half, "longer", STEPS * 5 // 8))
    return replace(longer, name=half.name.replace("half", "five-eighths"))


def variants(row: Row) -> dict[str, tuple[str, ...]]:
    """Return changes of a row with the recipe, by name."""
    parts: dict[str, tuple[str, ...]] = {
        "without-embedding-rate": ("optimizer.embedding_learning_rate_scale=1",),
        "without-qk-norm": ("model.architecture=llama",),
    }
    if row.value("optimizer.algorithm") == "adamw":
        return parts
    steps, rate = row.steps, float(row.value("optimizer.learning_rate"))
    return parts | {
        "without-init-std": ("model.init_std=0.02",),
        "without-momentum": ("optimizer.muon.momentum=0.95",),
        "without-warmup": (f"scheduler.warmup_steps={steps // 20}",),
        "decay-0.2": ("scheduler.decay_fraction=0.2",),
        "linear": ("scheduler.decay_fraction=0.99",),  # all that follows the warm-up
        "cosine": ("scheduler.strategy=cosine",),
        "min-lr": (f"scheduler.min_lr={0.1 * rate:g}",),
        "polar-express": ("optimizer.muon.polynomials=polar_express",),
        "z-loss": ("optimizer.z_loss=1e-4",),
        # The same tokens, with 10 sequences on average instead of 16 in a quarter of the steps.
        "batch-warmup": (
            f"scheduler.total_steps={steps + steps * 3 // 32}", f"scheduler.batch_warmup_steps={steps // 4}",
            "scheduler.batch_warmup_start=4",
        ),
    }  # fmt: skip


def transfer() -> list[Row]:
    """Return AdamW runs of several rates at two widths, the larger one scaled (muP) or not, on a quarter."""
    widths = {"128": (128, 352, 2, 1), "512": (512, 1408, 8, 2), "512-scaled": (512, 1408, 8, 2)}
    rows = []
    for name, (hidden, intermediate, heads, kv_heads) in widths.items():
        keys = (
            f"model.hidden_size={hidden}", f"model.intermediate_size={intermediate}", "model.num_layers=2",
            f"model.num_attention_heads={heads}", f"model.num_key_value_heads={kv_heads}",
            *["model.base_hidden_size=128"] * name.endswith("scaled"),
        )  # fmt: skip
        for rate in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3):
            whole = Row(f"width{name}-{rate:g}", "10m", (*keys, f"optimizer.learning_rate={rate:g}"))
            rows += shortened(whole, "quarter", STEPS // 4).seeds()
    return rows
