"""Which tokenizer an experiment uses: one that a flag or the config names, the one that it has, or one to train."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator import _native, run_files, tokenizer
from orchestrator.command_error import CommandError
from orchestrator.long_words import LARGEST_VARIETY, LONGEST_WORD
from orchestrator.paths import shown
from orchestrator.progress import Reading, reading
from orchestrator.run_request import RunRequest
from orchestrator.screen import amount, counted, note, step
from orchestrator.settings import DEFAULT_SPLIT
from orchestrator.training_source import Source

DEFAULT_VOCAB_SIZE = 4096


def prepare(run: RunRequest, source: Source) -> tokenizer.Ready:
    """Return the tokenizer that is named, the experiment's if it fits, or one trained on the source."""
    path = _existing(run)
    if path is not None and not run.settings.force_retrain_tokenizer:
        ready = tokenizer.read(path)
        step("tokenizer", f"{ready.vocab_size:,} tokens: {shown(path)}")
        return ready
    request = _request(run, source)
    request.check()
    folder = run.location.tokenizer
    reusable = None if run.settings.force_retrain_tokenizer else tokenizer.reuse(folder, request)
    if reusable is not None:
        step("tokenizer", f"{reusable.vocab_size:,} tokens, trained before: {shown(reusable.path)}")
        return reusable
    return _train(run, source, request)


def special_tokens(run: RunRequest) -> list[str]:
    """Return the tokens that must stay whole: every tokenizer's, and what the config or special_tokens.txt adds."""
    own = run.base.values["tokenizer"]["special_tokens"]
    if not isinstance(own, list):
        own = run_files.read_special_tokens(Path(own) if own else run.location.folder / run_files.SPECIAL_TOKENS)
    return list(dict.fromkeys([*tokenizer.SPECIAL_TOKENS, *own]))


def _existing(run: RunRequest) -> Path | None:
    """Return the tokenizer that is taken as it is, whatever it was trained on."""
    if run.tokenizer_json is not None or not run.settings.skip_tokenizer:
        return run.tokenizer_json
    path = run.location.tokenizer / "tokenizer.json"
    if not path.exists():
        raise CommandError(f"--skip-tokenizer: {shown(path)} is not there: leave out the flag to train one")
    return path


def _request(run: RunRequest, source: Source) -> tokenizer.Request:
    """Return what a tokenizer is trained for, by which an existing one is recognised."""
    settings, base, data = run.settings, run.base, source.data
    return tokenizer.Request(
        vocab_size=base.vocab_size or DEFAULT_VOCAB_SIZE,
        special_tokens=special_tokens(run),
        source={
            "name": data.name, "revision": data.revision, "files": data.files, "bytes": data.bytes,
            "config": settings.data_config, "split": settings.split or base.data["split"] or DEFAULT_SPLIT,
            "text_column": base.data["text_column"],
            **({"mixture": source.mixture} if source.mixture else {}),
        },
        max_documents=min(settings.tokenizer_max_lines, run.max_samples(source) or settings.tokenizer_max_lines),
        seed=settings.tokenizer_seed,
    )  # fmt: skip


def _train(run: RunRequest, source: Source, request: tokenizer.Request) -> tokenizer.Ready:
    step("tokenizer", f"training {request.vocab_size:,} tokens on up to {request.max_documents:,} documents ...")
    start = time.monotonic()
    with reading() as progress:
        documents = source.data.documents(run.max_samples(source), progress.note)
        ready = tokenizer.train(run.location.tokenizer, request, _with_notices(documents, progress), progress)
    if skipped_rows := documents.describe_skipped():
        note(skipped_rows)
    if ready.facts is not None:
        text = f"{counted(ready.facts.documents, 'document')}, {amount(ready.facts.bytes)}"
        step("", f"{ready.vocab_size:,} tokens from {text} in {time.monotonic() - start:.1f} s: {shown(ready.path)}")
        _print_compression(ready.facts)
        _print_long_words(ready.facts)
    return ready


def _with_notices(documents: _native.Documents, progress: Reading) -> Iterator[str]:
    """Yield the documents, and show at once what is skipped."""
    for text in documents:
        for notice in documents.take_notices():
            progress.note(f"warning: {notice}")
        yield text
    for notice in documents.take_notices():
        progress.note(f"warning: {notice}")


def _print_compression(facts: tokenizer.Facts) -> None:
    if facts.bytes_per_token is None:
        return
    words = f", {facts.tokens_per_word:.2f} tokens per word" if facts.tokens_per_word else ""
    gpt2 = f"; GPT-2's: {facts.gpt2_bytes_per_token:.2f} bytes per token" if facts.gpt2_bytes_per_token else ""
    text = f"on {amount(facts.held_out_bytes)} of text that it was not trained on"
    step("", f"{facts.bytes_per_token:.2f} bytes per token{words} {text}{gpt2}")


def _print_long_words(facts: tokenizer.Facts) -> None:
    """Print in what way the text that the tokenizer was trained on differs from the source's."""
    if facts.split_words:
        words = counted(facts.split_words, "word")
        note(f"{words} of more than {LONGEST_WORD} characters without a break, split for the tokenizer's training only")
    if facts.left_out_characters:
        note(
            f"{facts.left_out_characters:,} characters of long words were left out of it: there are more than "
            f"{amount(LARGEST_VARIETY)} of different ones. Training reads them all"
        )
