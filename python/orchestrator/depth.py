"""The dial `--depth`: model sizes, learning rate, batch and length of training follow from the number of layers.

A rule that was measured in this project names the record; any other names its source and says that it was not.
"""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from typing import Any

MIN_DEPTH, MAX_DEPTH = 1, 32
WIDTH_PER_LAYER = 64
HEAD_SIZE = 64
QUERY_HEADS_PER_KV_HEAD = 4
MULTIPLE = 64
"""The MLP's width is rounded up to a multiple of this."""
TOKENS_PER_PARAMETER = 20
MEASURED_WIDTH, MEASURED_RATE, HIGHEST_RATE = 320, 3e-3, 4e-3
"""Hidden size at which Muon's learning rate was swept, the best rate there (docs/leaderboard.md), and the demo's."""
MEASURED_TOKENS, MEASURED_BATCH = 8.0e6, 8192
"""Tokens of the training runs in docs/leaderboard.md, and their tokens per step."""
BATCH_EXPONENT = 0.383
EMBEDDING_SCALE = 15
EVALUATIONS = 20
WRAP = 118

Keys = dict[str, tuple[Any, str]]
"""The values of config keys, each with its reason."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    depth: int
    vocab_size: int

    @property
    def width(self) -> int:
        """The hidden size."""
        return WIDTH_PER_LAYER * self.depth

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.width // HEAD_SIZE

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads: the divisor of the query heads that is nearest to a quarter of them."""
        divisors = [number for number in range(1, self.heads + 1) if self.heads % number == 0]
        return min(divisors, key=lambda number: (abs(number - self.heads / QUERY_HEADS_PER_KV_HEAD), -number))

    @property
    def intermediate(self) -> int:
        """The width of the MLP: 8/3 of the hidden size, rounded up."""
        return math.ceil(8 * self.width / 3 / MULTIPLE) * MULTIPLE

    @property
    def block_parameters(self) -> int:
        """The parameters of all blocks: attention, MLP, two norms and those of query and key heads."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * HEAD_SIZE
        norms = 2 * self.width + 2 * HEAD_SIZE
        return self.depth * (attention + 3 * self.width * self.intermediate + norms)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return 10 * self.vocab_size * self.width > self.block_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = self.vocab_size * self.width * (1 if self.tied else 2)
        return tables + self.block_parameters + self.width


def vocabulary(depth: int) -> int:
    """Return the vocabulary size of a model with `depth` layers."""
    return 4096 if depth < 8 else 16384 if depth < 12 else 32768


def sequence_length(depth: int) -> int:
    """Return the sequence length, in tokens, of a model with `depth` layers."""
    return 256 if depth < 4 else 512 if depth < 8 else 1024 if depth < 12 else 2048


def keys(depth: int, vocab_size: int | None = None) -> Keys:
    """Return the config of a model with `depth` layers, each value with its reason.

    Args:
        depth: From `MIN_DEPTH` to `MAX_DEPTH`.
        vocab_size: Tokens in the vocabulary; None for the usual one at this size.
    """
    size = Sizes(depth, vocab_size or vocabulary(depth))
    length = sequence_length(depth)
    tokens = TOKENS_PER_PARAMETER * size.parameters
    batch = max(length, 1 << round(math.log2(MEASURED_BATCH * (tokens / MEASURED_TOKENS) ** BATCH_EXPONENT)))
    steps = max(1, round(tokens / batch))
    rate = float(f"{min(HIGHEST_RATE, MEASURED_RATE * math.sqrt(MEASURED_WIDTH / size.width)):.2g}")
    interval = max(1, min(1000, steps // EVALUATIONS))
    training = {**_optimizer(size, rate), **_schedule(steps), **_runtime(interval)}
    return {**_model(size, length), **_data(length, batch), **training}


def _model(size: Sizes, length: int) -> Keys:
    table = size.vocab_size * size.width
    share = table / size.block_parameters
    tied = (
        f"the table has {share:.0%} of the parameters of the blocks: above a tenth, a head of its own is not worth "
        "them. Not measured."
        if size.tied
        else f"a head of its own: the table has {share:.0%} of the parameters of the blocks. Not measured."
    )
    group = size.heads // size.kv_heads
    return {
        "model.architecture": (
            "qwen3",
            "Llama with a norm of each query and key head (QK-norm). Measured: 0.17 nats in half of the tokens "
            "of docs/leaderboard.md, for 0 to 5% more time per token.",
        ),
        "model.vocab_size": (
            size.vocab_size,
            "4,096 tokens in the rows of docs/leaderboard.md, 16,384 and 32,768 as the shipped presets of this size. "
            "`orchestrate` takes the tokenizer's.",
        ),
        "model.num_layers": (size.depth, "the dial."),
        "model.hidden_size": (
            size.width,
            f"{WIDTH_PER_LAYER} x depth, as nanochat has it. The shape at a fixed size was not measured here.",
        ),
        "model.intermediate_size": (
            size.intermediate,
            f"8/3 of hidden_size (Touvron et al. 2023), rounded up to a multiple of {MULTIPLE}. Not measured here.",
        ),
        "model.num_attention_heads": (size.heads, f"of {HEAD_SIZE} each, as in the shipped presets."),
        "model.num_key_value_heads": (
            size.kv_heads,
            f"{group} query heads share one, near {QUERY_HEADS_PER_KV_HEAD}: generation keeps 1/{group} of the keys "
            "and values. What it costs in loss was not measured."
            if group > 1
            else "one per query head.",
        ),
        "model.max_position_embeddings": (length, "the sequence length."),
        "model.tie_embeddings": (size.tied, tied),
    }


def _data(length: int, batch: int) -> Keys:
    return {
        "data.sequence_length": (
            length,
            "256 is the demo's, 512 that of docs/leaderboard.md, 1,024 and 2,048 the shipped presets'. Not measured "
            "against each other.",
        ),
        "data.batch_size": (
            "auto",
            "the largest micro-batch that the plan fits into the device's memory; it changes the result by rounding "
            "only.",
        ),
        "data.sequences_per_step": (
            batch // length,
            f"{batch:,} tokens per step. Measured: 4,096 beat 2,048 in 1.1 M tokens (docs/experiments/learning.md), "
            f"and the rows of docs/leaderboard.md train 8.0 M tokens with {MEASURED_BATCH:,}. From there it grows with "
            f"tokens^{BATCH_EXPONENT} (Bergsma et al. 2025, arXiv:2505.13738; not measured here), as a power of two.",
        ),
    }


def _optimizer(size: Sizes, rate: float) -> Keys:
    return {
        "optimizer.algorithm": (
            "muon",
            "measured: it ended 0.42 nats below AdamW, each at its best rate (docs/leaderboard.md); it keeps 4 bytes "
            "per weight of a projection less (docs/decisions/018).",
        ),
        "optimizer.learning_rate": (
            rate,
            f"measured: {MEASURED_RATE:g} was the best of six at hidden size {MEASURED_WIDTH} (docs/leaderboard.md), "
            f"and {HIGHEST_RATE:g} is the demo's at 192. In between and beyond, by sqrt({MEASURED_WIDTH} / "
            "hidden_size): the spectral norm of a Muon update grows so (docs/decisions/019; not measured at other "
            f"widths), and at most {HIGHEST_RATE:g}. With the recipe of docs/leaderboard.md 5e-3 was the "
            "best, by 0.01 nats; longer training bears less.",
        ),
        "optimizer.embedding_learning_rate_scale": (
            1 if size.tied else EMBEDDING_SCALE,
            "with a table that is the head as well, more gains nothing (docs/experiments/learning.md)."
            if size.tied
            else "measured: 0.29 nats in half of the tokens of docs/leaderboard.md.",
        ),
        "optimizer.weight_decay": (
            0.1,
            "that of every row of docs/leaderboard.md. Measured: 0 to 1 differ by less than two seeds.",
        ),
    }


def _schedule(steps: int) -> Keys:
    return {
        "scheduler.strategy": (
            "wsd",
            "constant, then a linear decay, which can be continued with more tokens. Measured in the demo: a decay to "
            "zero from a higher rate is half of what it gains on AdamW with a cosine, 0.52 nats "
            "(docs/experiments/learning.md).",
        ),
        "scheduler.total_steps": (
            steps,
            f"{TOKENS_PER_PARAMETER} tokens per parameter use a budget of FLOPs best (Hoffmann et al. 2022). Not "
            "measured by us: our rows train 0.8.",
        ),
        "scheduler.decay_fraction": (
            0.4,
            "that of every row of docs/leaderboard.md. Measured there: 0.2 is as good, 0.99 is 0.18 nats worse "
            "(docs/experiments/learning.md).",
        ),
        "scheduler.min_lr": (0.0, "the decay goes to zero, as measured in the demo."),
    }


def _runtime(interval: int) -> Keys:
    return {
        "runtime.precision": (
            "bf16",
            "measured: 2,000 steps end within 0.006 nats of fp32 (docs/experiments/learning.md), in half of the memory "
            "of weights and activations.",
        ),
        "runtime.activation_recompute": (
            "selective",
            "recomputes norms and SwiGLU, which is nearly free: memory for larger micro-batches.",
        ),
        "runtime.checkpoint.every_n_steps": (
            interval,
            f"about {EVALUATIONS} in the whole training, at most 1,000 apart.",
        ),
        "runtime.evaluation.every_n_steps": (interval, "the same."),
    }


def preset(depth: int, vocab_size: int | None = None, header: list[str] | None = None) -> str:
    """Return the config of a model with `depth` layers as YAML, with the reasons as comments.

    Args:
        depth: From `MIN_DEPTH` to `MAX_DEPTH`.
        vocab_size: Tokens in the vocabulary; None for the usual one at this size.
        header: Lines of comment after the first ones.
    """
    values = keys(depth, vocab_size)
    value = {key: value for key, (value, _) in values.items()}
    size = Sizes(depth, value["model.vocab_size"])
    sequences, length = value["data.sequences_per_step"], value["data.sequence_length"]
    steps = value["scheduler.total_steps"]
    lines = [
        f"# A model of {depth} layer{'s' if depth > 1 else ''}: what `orchestrate --depth {depth}` trains.",
        "#",
        f"#   parameters          {size.parameters:,} (with the vocabulary of {size.vocab_size:,})",
        f"#   an optimizer step   {sequences:,} x {length:,} = {sequences * length:,} tokens",
        f"#   the whole training  {steps:,} steps, {steps * sequences * length:,} tokens",
        *(f"#{' ' if line else ''}{line}" for line in ["", *(header or [])]),
        *(["#"] if header else []),
        "# Rules that this project has measured name the record, the others say that it has not.",
    ]
    section: tuple[str, ...] = ()
    for key, (chosen_value, reason) in values.items():
        *path, name = key.split(".")
        lines += _opened(section, tuple(path))
        section = tuple(path)
        indent = "  " * len(path)
        lines += [f"{indent}# {line}" for line in textwrap.wrap(f"{name}: {reason}", WRAP - len(indent))]
        lines.append(f"{indent}{name}: {json.dumps(chosen_value)}".replace('"', ""))
    return "\n".join(lines) + "\n"


def _opened(before: tuple[str, ...], path: tuple[str, ...]) -> list[str]:
    """Return the lines that open the mappings of `path` behind a key in `before`."""
    shared = 0
    while shared < min(len(before), len(path)) and before[shared] == path[shared]:
        shared += 1
    new = [f"{'  ' * level}{path[level]}:" for level in range(shared, len(path))]
    return ["", *new] if shared == 0 else new


def reasons(depth: int, vocab_size: int | None, values: dict[str, Any]) -> str:
    """Return the reasons as comments for the head of a config: of the keys whose value in `values` is the dial's."""
    lines = [f"# Chosen by --depth {depth}, where neither a flag nor the tokenizer says otherwise:", "#"]
    for key, (expected, reason) in keys(depth, vocab_size).items():
        value: Any = values
        for name in key.split("."):
            value = value[name]
        if value == expected:
            text = f"{key} {json.dumps(expected)}: {reason}".replace('"', "")
            lines += textwrap.wrap(text, WRAP, initial_indent="# ", subsequent_indent="#   ")
    return "\n".join(lines) + "\n#\n"
