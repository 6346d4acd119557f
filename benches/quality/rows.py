"""The rows of the quality bench: one training run each, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RATES = {"adamw": (5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 8e-3), "muon": (1e-3, 2e-3, 3e-3, 5e-3, 8e-3, 1.2e-2)}
"""Peak learning rates of the sweep."""
STEPS = 976
QUARTER = STEPS // 4
SEEDS = (1, 2, 3)

RECIPE = {
    "embedding-rate": "optimizer.embedding_learning_rate_scale=10",
    "qk-norm": "model.architecture=qwen3",
}
"""What gains much, by name."""


@dataclass(frozen=True)
class Row:
    """A run: a config of this folder, and what the row changes in it."""

    name: str
    config: str
    overrides: tuple[str, ...]
    seed: int = 1

    def changed(self, suffix: str, *overrides: str) -> Row:
        """Return the run with further overrides, in place of its own of the same keys, and named with a suffix."""
        keys = {override.partition("=")[0] for override in overrides}
        kept = [override for override in self.overrides if override.partition("=")[0] not in keys]
        return replace(self, name=f"{self.name}-{suffix}", overrides=(*kept, *overrides))

    def with_seed(self, seed: int) -> Row:
        """Return the run with another seed, and so other initial weights and another order of the data."""
        return self if seed == self.seed else replace(self, name=f"{self.name}-seed{seed}", seed=seed)


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
    """Return the run with every part of the recipe."""
    return row.changed("recipe", *RECIPE.values())


def after_sweep(adamw: Row, muon: Row) -> list[Row]:
    """Return the rows that follow the sweep, from its winners.

    AdamW is trained with the recipe too, Muon with it on half of the tokens. The recipe's parts and further changes are
    compared on a quarter.
    """
    half, quarter = shortened(muon, "half", STEPS // 2), shortened(muon, "quarter", QUARTER)
    reference, winner, short = map(with_recipe, (adamw, half, quarter))
    parts = [
        quarter,
        short,
        *(quarter.changed(name, key) for name, key in RECIPE.items()),
        *(short.changed(name, *keys) for name, keys in variants(rate_of(muon)).items()),
    ]
    larger = [replace(row, name=row.name.replace("10m", "25m"), config="25m") for row in (reference, winner)]
    seeds = [row.with_seed(seed) for seed in SEEDS[1:] for row in (reference, winner)]
    return [half, half.changed("embedding-rate", RECIPE["embedding-rate"]), winner, reference, *parts, *seeds, *larger]


def variants(rate: float) -> dict[str, tuple[str, ...]]:
    """Return changes of a row of a quarter of the tokens and Muon's best rate, by name."""
    return {
        "decay-0.2": ("scheduler.decay_fraction=0.2",),
        "linear": ("scheduler.decay_fraction=0.95",),  # all that follows the warm-up
        "cosine": ("scheduler.strategy=cosine",),
        "min-lr": (f"scheduler.min_lr={0.1 * rate:g}",),
        "polar-express": ("optimizer.muon.polynomials=polar_express",),
        "z-loss": ("optimizer.z_loss=1e-4",),
        # The same tokens: 122 steps of 10 sequences on average instead of 16.
        "batch-warmup": (
            f"scheduler.total_steps={QUARTER + 45}", "scheduler.batch_warmup_steps=122",
            "scheduler.batch_warmup_start=4",
        ),
        **{f"init-std-{std:g}": (f"model.init_std={std:g}",) for std in (0.005, 0.01, 0.05)},
        # The embedding keeps its own rate.
        "lower-rate": (f"optimizer.learning_rate={rate / 1.5:g}", "optimizer.embedding_learning_rate_scale=15"),
        "higher-rate": (f"optimizer.learning_rate={rate * 2:g}", "optimizer.embedding_learning_rate_scale=5"),
    }  # fmt: skip


def rate_of(row: Row) -> float:
    """Return the row's peak learning rate."""
    key = "optimizer.learning_rate="
    return float(next(override for override in row.overrides if override.startswith(key)).removeprefix(key))


def transfer() -> list[Row]:
    """Return AdamW runs of several rates at two widths, the larger one scaled (muP) or not, on a quarter."""
    widths = {"128": (128, 344, 2, 1), "512": (512, 1376, 8, 2), "512-scaled": (512, 1376, 8, 2)}
    rows = []
    for name, (hidden, intermediate, heads, kv_heads) in widths.items():
        keys = (
            f"model.hidden_size={hidden}", f"model.intermediate_size={intermediate}", "model.num_layers=2",
            f"model.num_attention_heads={heads}", f"model.num_key_value_heads={kv_heads}",
            *["model.base_hidden_size=128"] * name.endswith("scaled"),
        )  # fmt: skip
        for rate in (1e-3, 2e-3, 4e-3, 8e-3):
            whole = Row(f"width{name}-{rate:g}", "10m", (*keys, f"optimizer.learning_rate={rate:g}"))
            rows.append(shortened(whole, "quarter", QUARTER))
    return rows


def better_half(rows: list[Row], loss: Callable[[Row], float]) -> list[Row]:
    """Return the half of the rows with the lower losses."""
    return sorted(rows, key=loss)[: len(rows) // 2]
