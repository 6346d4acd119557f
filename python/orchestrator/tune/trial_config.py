"""The configs of a study: the base run with a trial's values, at a fixed number of tokens."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import _native
from orchestrator.base_config import FORMATS
from orchestrator.command_error import CommandError
from orchestrator.input_files import read_text
from orchestrator.paths import shown
from orchestrator.run_files import STREAMING_CONFIG, TRAINING_CONFIG
from orchestrator.tune.space import Space, value_of

KEYS_IN_STEPS = {
    "scheduler.warmup_steps", "scheduler.decay_steps", "scheduler.batch_warmup_steps",
    "runtime.evaluation.every_n_steps", "runtime.checkpoint.every_n_steps",
}  # fmt: skip
"""Keys in steps that are scaled with `total_steps`, so that runs with other batches act after as many tokens."""


@dataclass(frozen=True)
class Base:
    """The run that a study varies."""

    config: Path
    text: str
    values: dict[str, Any]
    """The value of every key of the config, before it is resolved."""
    tokenizer: Path
    tokens: int
    """Tokens that a trial trains on."""
    full_tokens: int
    """Tokens of the config's own run."""
    threads: int | None
    """CPU threads of a trial; None for the config's own number."""

    def trial_values(self, overrides: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Return a config's values with some changed and `total_steps` for a number of tokens.

        A trial is evaluated on as many held-out tokens as the base.

        Raises:
            ConfigError: The values contradict each other.
        """
        values_to_set = dict(overrides)
        if "data.sequences_per_step" in values_to_set:
            # The split into micro-batches changes results by rounding only.
            values_to_set = {"data.batch_size": "auto", "data.gradient_accumulation_steps": None} | values_to_set
        values_to_set["scheduler.total_epochs"] = None
        values = self._parsed(values_to_set)
        size = tokens_per_step(values)
        held_out = self.values["runtime"]["evaluation"]["max_batches"] * tokens_per_step(self.values)
        values_to_set.setdefault("runtime.evaluation.max_batches", max(1, round(held_out / size)))
        in_steps = {key: value_of(values, key) for key in KEYS_IN_STEPS - set(overrides)}
        base_steps, steps = values["scheduler"]["total_steps"], max(1, round(tokens / size))
        while True:
            shares = {key: round(count * steps / base_steps) for key, count in in_steps.items() if count}
            shares |= {key: max(1, share) for key, share in shares.items() if key.startswith("runtime.")}
            values = self._parsed({**values_to_set, "scheduler.total_steps": steps, **shares})
            missing_tokens = tokens - tokens_of(values, steps)
            if missing_tokens <= size / 2:
                return values
            steps += max(1, missing_tokens // size)

    def _parsed(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        text = [f"{key}={written(value)}" for key, value in overrides.items()]
        return _native.parse_config(self.text, FORMATS[self.config.suffix], text, self.config)

    def write(self, folder: Path, values: dict[str, Any]) -> Path:
        """Write a run's files into a folder and return the path of its config."""
        folder.mkdir(parents=True, exist_ok=True)
        streaming = self.config.with_name(STREAMING_CONFIG)
        if streaming.exists():
            shutil.copyfile(streaming, folder / STREAMING_CONFIG)
        values = {**values, "tokenizer": {**values["tokenizer"], "tokenizer_json": str(self.tokenizer)}}
        config = folder / TRAINING_CONFIG
        config.write_text(_native.config_to_yaml(values), encoding="utf-8")
        return config


def open_base(config: Path, tokens: int | None, threads: int | None) -> Base:
    """Return the run of a config that is ready to train.

    Args:
        config: A config with its tokenizer and data, as `orchestrate --launch none` leaves it.
        tokens: Tokens of a trial; None for those of the config.
        threads: CPU threads of a trial.
    """
    if config.suffix not in FORMATS:
        raise CommandError(f"--config {shown(config)}: the name must end in .yaml, .toml or .json")
    run = _native.RunConfig.load(config)
    resolved = run.to_dict()
    if resolved["data"]["mixture"] or resolved["data"]["train_shards"] or config.with_name(STREAMING_CONFIG).exists():
        text = read_text(config)
    else:
        raise CommandError(f"{shown(config)} names no data: prepare the run with `orchestrate --launch none`")
    steps = resolved["scheduler"]["total_steps"]
    if steps is None:
        raise CommandError(
            f"{shown(config)} gives scheduler.total_epochs: a search compares runs of equal tokens, so give total_steps"
        )
    if resolved["stages"]:
        raise CommandError(
            f"{shown(config)} gives stages: a search compares runs of one stage, so search without them and add them "
            "to the config of the winner"
        )
    values = _native.parse_config(text, FORMATS[config.suffix], [], config)
    values["data"]["tokens_per_step"] = tokens_per_step(values)
    full = tokens_of(resolved, steps)
    tokenizer = Path(resolved["tokenizer"]["tokenizer_json"])
    return Base(config.absolute(), text, values, tokenizer, tokens or full, full, threads)


def tokens_per_step(values: Mapping[str, Any]) -> int:
    """Return the tokens of an optimizer step after the batch-size warm-up."""
    return int(values["data"]["sequences_per_step"] * values["data"]["sequence_length"])


def tokens_of(values: Mapping[str, Any], steps: int) -> int:
    """Return the tokens of a number of optimizer steps, fewer in a batch-size warm-up."""
    most, warmup = values["data"]["sequences_per_step"], values["scheduler"]["batch_warmup_steps"]
    first = values["scheduler"]["batch_warmup_start"] or -(-most // 8)
    missing_sequences = sum(most - first - (most - first) * step // warmup for step in range(min(steps, warmup)))
    return int((most * steps - missing_sequences) * values["data"]["sequence_length"])


def overrides_of(base: Base, space: Space, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a trial sets: the searched ones, and the sizes that a fixed number of parameters gives."""
    overrides = dict(point)
    if space.fixed_parameters is not None:
        overrides |= _sizes(base, overrides, space.fixed_parameters)
    return overrides


def _sizes(base: Base, overrides: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """Return the hidden size nearest to a number of parameters, with the base's heads and width of the MLP.

    The parameters of a model grow with its hidden size, so the size is bracketed, then bisected.
    """
    model = base.values["model"]
    head = model["head_dim"] or model["hidden_size"] // model["num_attention_heads"]
    group = model["num_attention_heads"] // (model["num_key_value_heads"] or model["num_attention_heads"])
    ratio = model["intermediate_size"] / model["hidden_size"]

    def sizes(kv_heads: int) -> dict[str, Any]:
        hidden = head * group * kv_heads
        return {
            "model.hidden_size": hidden,
            "model.intermediate_size": max(16, round(ratio * hidden / 16) * 16),
            "model.num_attention_heads": group * kv_heads,
            "model.num_key_value_heads": kv_heads,
        }

    def count(kv_heads: int) -> int:
        """Return the number of parameters of a model of this size."""
        text = [f"{key}={written(value)}" for key, value in {**overrides, **sizes(kv_heads)}.items()]
        text += [f"tokenizer.tokenizer_json={base.tokenizer}", "runtime.device=cpu"]
        return _native.memory_plan(_native.RunConfig.load_for_planning(base.config, text)).parameters

    low, high = 1, 2
    while count(high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < parameters else (low, middle)
    nearest = min((low, high), key=lambda kv_heads: abs(count(kv_heads) - parameters))
    return sizes(nearest)


def check_bounds(base: Base, space: Space) -> None:
    """Check the values at the ends of every range against the config, each by itself.

    Raises:
        CommandError: All that the config refuses.
    """
    problems = []
    for key, values in space.parameters.items():
        if isinstance(value_of(base.values, key), (dict, list)):
            problems.append(f"{key}: is a list or a section of the config, which is not searched")
        for value in values.bounds():
            try:
                base.trial_values({key: value}, base.tokens)
            except _native.ConfigError as error:
                problems += _about(key, str(error))
    if problems:
        raise CommandError("\n".join(["the search space holds what no config may have:", *dict.fromkeys(problems)]))


def _about(key: str, message: str) -> list[str]:
    """Return the lines of a config's problems that name a key, from the key on."""
    lines = [line[line.index(f"{key}: ") :] for line in message.splitlines() if f"{key}: " in line]
    return [without_origin(line) for line in lines]


def without_origin(message: str) -> str:
    """Return a config's problem without the flag that gave the value, which nobody typed."""
    return message.replace(" (given by --override)", "")


def written(value: Any) -> str:
    """Return a value as an override has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
