"""Writes the files of a run into its folder, and warns where the run takes more text than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator import _native, base_config, depth, experiment_tokenizer, run_files, tokenizer, training_length
from orchestrator.paths import shown
from orchestrator.run_request import RunRequest
from orchestrator.screen import note, step, warn
from orchestrator.settings import DEFAULT_SPLIT, DEFAULT_STREAM_BATCH_SIZE
from orchestrator.training_source import Source


def write_files(run: RunRequest, source: Source, ready: tokenizer.Ready) -> Path:
    """Write what describes the run into its folder and return the config's path."""
    settings, base, folder = run.settings, run.base, run.location.folder
    values = base_config.complete(base, settings, ready, source.shards, source.mixture)
    run_files.copy_tokenizer(folder, ready)
    if (template := values["data"]["chat_template"]) not in (None, *_native.BUILT_IN_CHAT_TEMPLATES):
        run_files.keep_chat_template(folder, template)
        values["data"]["chat_template"] = None
    streaming = run_files.write_streaming_config(folder, _streaming_config(run, source))
    if streaming is not None:
        step("wrote", shown(streaming))
    if settings.open_keys is not None and (
        remark := training_length.fit(values, folder, settings.open_keys, settings.nproc or 1)
    ):
        note(remark)
    text = _native.config_to_yaml(values)
    if base.depth is not None:
        text = depth.reasons(base.depth, settings.vocab_size, values) + text
    if ready.facts is not None and not (folder / run_files.SPECIAL_TOKENS).exists():
        tokens = experiment_tokenizer.special_tokens(run)
        step("wrote", shown(run_files.write_special_tokens(folder, tokens)))
    config, former = run_files.write_training_config(folder, text)
    step("wrote", f"{shown(config)} (from {base.origin})")
    if former is not None:
        note(f"The previous training.yaml differed and is kept as {former.name}.")
    return config


def _streaming_config(run: RunRequest, source: Source) -> dict[str, Any] | None:
    """Return the description of the data set that is streamed, in the order of the file; None where none is."""
    if source.shards is not None or source.mixture is not None:
        return None
    settings = run.settings
    return {
        "dataset": source.data.name,
        "split": settings.split or DEFAULT_SPLIT,
        "max_samples": settings.max_samples,
        "stream_batch_size": settings.stream_batch_size or DEFAULT_STREAM_BATCH_SIZE,
        "experiment": run.location.experiment,
        "config": settings.data_config,
        "revision": source.data.revision,
        "text_column": run.base.data["text_column"],
        "tokenizer": str(run_files.TOKENIZER),
    }


def warn_of_repeated_text(run: RunRequest, source: Source, ready: tokenizer.Ready) -> None:
    """Warn where the run takes more tokens than the data hold, so that the same documents are read several times."""
    settings, tokens, facts = run.settings, run.base.tokens_in_all, ready.facts
    if tokens is None or facts is None:
        return
    if samples := run.max_samples(source):
        documents: float | None = samples
        data = f"--max-samples {samples:,}"
    elif source.shards is not None:
        documents = tokenizer.documents_in_all(facts, settings.tokenizer_max_lines, settings.tokenizer_seed)
        data = "the text of --input" if settings.input else "the text of data.train_shards"
    else:
        return
    if documents is not None and tokens > (tokens_of_data := documents * facts.tokens_per_document):
        warn(
            f"{data} is about {tokens_of_data:,.0f} tokens and the run takes {tokens:,}: "
            f"the same documents are read about {tokens / tokens_of_data:.1f} times"
        )
