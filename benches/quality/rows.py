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


@dataclass(frozen=True)
class Row:
    """A run: a config of this folder, and what the row changes in it."""

    name: str
    config: str
    overrides: tuple[str, ...]
    seed: int = 1

    def changed(self, suffix: str, *overrides: str) -> Row:
        """Return the run with further overrides, named with a suffix."""
        return replace(self, name=f"{self.name}-{suffix}", overrides=(*self.overrides, *overrides))

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


def after_sweep(adamw: Row, muon: Row) -> list[Row]:
    """Return the rows that follow the sweep, from its winners; Muon's are trained on half the tokens.

    The parts of the recipe are compared with the embedding's own rate, which gains most, and so is AdamW.
    """
    embedding_rate = "optimizer.embedding_learning_rate_scale=10"
    adamw_tuned = adamw.changed("embedding-rate", embedding_rate)
    half = muon.changed("half", f"scheduler.total_steps={STEPS // 2}", "scheduler.warmup_steps=24")
    tuned = half.changed("embedding-rate", embedding_rate)
    recipe = [
        tuned.changed("linear", "scheduler.decay_fraction=0.95"),  # all that follows the warm-up
        tuned.changed("cosine", "scheduler.strategy=cosine"),
        tuned.changed("min-lr", f"scheduler.min_lr={0.1 * rate_of(muon):g}"),
        tuned.changed("polar-express", "optimizer.muon.polynomials=polar_express"),
        tuned.changed("z-loss", "optimizer.z_loss=1e-4"),
        tuned.changed("batch-warmup", "scheduler.batch_warmup_steps=61", "scheduler.batch_warmup_start=4"),
        tuned.changed("qk-norm", "model.architecture=qwen3"),
        tuned.changed("zeros", "model.residual_init_std=0"),
    ]
    larger = [replace(row, name=row.name.replace("10m", "25m"), config="25m") for row in (adamw_tuned, tuned)]
    seeds = [row.with_seed(seed) for seed in SEEDS[1:] for row in (adamw_tuned, tuned)]
    return [adamw_tuned, half, tuned, *recipe, *seeds, *larger]


def rate_of(row: Row) -> float:
    """Return the row's peak learning rate."""
    key = "optimizer.learning_rate="
    return float(next(override for override in row.overrides if override.startswith(key)).removeprefix(key))


def transfer() -> list[Row]:
    """Return AdamW runs of several rates at two widths, the larger one scaled (muP) or not, a quarter long."""
    widths = {"128": (128, 344, 2, 1), "512": (512, 1376, 8, 2), "512-scaled": (512, 1376, 8, 2)}
    rows = []
    for name, (hidden, intermediate, heads, kv_heads) in widths.items():
        keys = (
            f"model.hidden_size={hidden}", f"model.intermediate_size={intermediate}", "model.num_layers=2",
            f"model.num_attention_heads={heads}", f"model.num_key_value_heads={kv_heads}",
            f"scheduler.total_steps={QUARTER}", "scheduler.warmup_steps=24",
            *["model.base_hidden_size=128"] * name.endswith("scaled"),
        )  # fmt: skip
        rates = (1e-3, 2e-3, 4e-3, 8e-3)
        rows += [Row(f"width{name}-{rate:g}", "10m", (*keys, f"optimizer.learning_rate={rate:g}")) for rate in rates]
    return rows


def better_half(rows: list[Row], loss: Callable[[Row], float]) -> list[Row]:
    """Return the half of the rows with the lower losses."""
    return sorted(rows, key=loss)[: len(rows) // 2]
