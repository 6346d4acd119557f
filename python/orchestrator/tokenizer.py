"""The experiment's tokenizer: byte-level BPE with GPT-2's pre-tokenisation, trained once and then reused.

A folder `artifacts/tokenizer/EXPERIMENT/` holds what transformers loads (tokenizer.json, tokenizer_config.json,
special_tokens_map.json), the vocabulary and merges as plain files, and a manifest that says what it was trained for.

It is trained on the first documents of the source in listing order, up to a number of documents and of bytes, and tried
on every fiftieth of them, which it is not trained on. The beginning, and not a sample drawn from everything (a
reservoir): that would read a data set of terabytes to its end before the first step. Held in memory are the different
words of at most 256 MB of text, never the text; of long words only so many (`long_words.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import _native
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.input_files import parse_json, read_bytes, read_text
from orchestrator.long_words import LongWords
from orchestrator.progress import Reading
from orchestrator.temporary_folder import removed, staging_of
from orchestrator.written_files import naming, sync

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
"""The padding token: unused in training here, for those who fine-tune in padded batches."""
SPECIAL_TOKENS = (END_OF_TEXT, PADDING)
ROLES = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}
LARGEST_SAMPLE = 256_000_000
ENTROPY_SAMPLE = 2_000_000
HELD_OUT_EVERY = 50
LARGEST_HELD_OUT = 2_000_000
BYTES_ALPHABET = 256
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", MANIFEST,
)  # fmt: skip
"""The files of a tokenizer's folder, the manifest last."""
GPT2 = "openai-community/gpt2"


@dataclass(frozen=True)
class Request:
    """The settings and the text source of a tokenizer; an existing one with an equal request is reused."""

    vocab_size: int
    special_tokens: list[str]
    source: dict[str, Any]
    max_documents: int
    seed: int | None
    max_bytes: int = LARGEST_SAMPLE
    format_version: int = FORMAT_VERSION

    def check(self) -> None:
        """Raise a `CommandError` if no byte-level vocabulary can be that small."""
        smallest = BYTES_ALPHABET + len(self.special_tokens)
        if self.vocab_size < smallest:
            raise CommandError(
                f"--vocab-size {self.vocab_size} is too small: a byte-level vocabulary starts with "
                f"{BYTES_ALPHABET} bytes and {len(self.special_tokens)} special tokens: at least {smallest}"
            )


@dataclass(frozen=True)
class Facts:
    """Statistics of the text, measured while the tokenizer was trained."""

    documents: int
    bytes: int
    tokens_per_document: float
    unigram_entropy: float
    """Entropy of the token frequencies, in nats per token: the loss of a model that knows nothing else."""
    held_out_bytes: int
    """Bytes of the text that was held out to try the tokenizer on; 0 if there were too few documents to spare one."""
    bytes_per_token: float | None
    """Bytes per token of the held-out text; None if it is empty."""
    tokens_per_word: float | None
    """Tokens per word of the held-out text, split at white space; None if it is empty."""
    gpt2_bytes_per_token: float | None
    """GPT-2's bytes per token of the same text, if its tokenizer is in the Hugging Face cache."""
    split_words: int = 0
    """Words that were longer than `long_words.LONGEST_WORD` characters, and were split for training."""
    left_out_characters: int = 0
    """Characters of long words that were not trained on, as there were too many different ones."""


@dataclass(frozen=True)
class Ready:
    """A tokenizer on disk; its facts are None if it was not trained here."""

    path: Path
    vocab_size: int
    facts: Facts | None


@dataclass
class _Sample:
    """Passes documents to the tokenizer's trainer: limits and counts them, keeps the first, holds some out."""

    long_words: LongWords
    documents: int = 0
    bytes: int = 0
    first_texts: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    held_out_bytes: int = 0

    def take(self, texts: Iterable[str], request: Request, reading: Reading) -> Iterator[str]:
        generator = random.Random(request.seed)
        for number, text in enumerate(texts, start=1):
            if number % HELD_OUT_EVERY == 0 and self.held_out_bytes < LARGEST_HELD_OUT:
                self.held_out.append(text)
                self.held_out_bytes += len(text.encode())
                continue
            if request.seed is not None and generator.random() < 0.5:
                continue
            if self.bytes < ENTROPY_SAMPLE:
                self.first_texts.append(text)
            self.documents += 1
            self.bytes += len(text.encode())
            yield from self.long_words.parts(text)
            share = max(self.documents / request.max_documents, self.bytes / request.max_bytes)
            reading.advance(share, self.documents, self.bytes)
            if share >= 1:
                break
        reading.end()


def reuse(folder: Path, request: Request) -> Ready | None:
    """Return the tokenizer in `folder` if it is complete and was trained for the same request."""
    manifest = _manifest(folder)
    if manifest is None or manifest["request"] != asdict(request):
        return None
    return Ready(folder / "tokenizer.json", manifest["vocab_size"], Facts(**manifest["facts"]))


def facts(folder: Path) -> Facts | None:
    """Return what is known of the tokenizer in `folder`."""
    manifest = _manifest(folder)
    return Facts(**manifest["facts"]) if manifest else None


def documents_in_all(facts: Facts, max_documents: int, seed: int | None) -> float | None:
    """Return about how many documents the source has; None if the tokenizer was not trained on all of it."""
    if facts.documents >= max_documents or facts.bytes >= LARGEST_SAMPLE:
        return None
    read = facts.documents if seed is None else 2 * facts.documents
    return read * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1)


def train(folder: Path, request: Request, texts: Iterable[str], reading: Reading) -> Ready:
    """Train a tokenizer on `texts` and write its folder, the manifest last. `reading` hears how far it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=request.vocab_size,
        special_tokens=request.special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    sample = _Sample(LongWords(tokenizer.pre_tokenizer))
    tokenizer.train_from_iterator(sample.take(texts, request, reading), trainer)
    if not sample.documents:
        name, column = request.source["name"], request.source["text_column"]
        raise CommandError(
            f"{name} has no text to train a tokenizer on: is it empty, or is its column or field not "
            f"{column!r} (--text-column)?",
            ExitCode.DATA_UNREADABLE,
        )
    facts = _measure(tokenizer, sample)
    _write(folder, tokenizer, request, facts)
    return Ready(folder / "tokenizer.json", tokenizer.get_vocab_size(), facts)


def read(path: Path) -> Ready:
    """Return an existing tokenizer, or raise a `CommandError` that names the file."""
    try:
        _native.check_tokenizer_json(path)
    except _native.DataError as error:
        raise CommandError(str(error)) from error
    return Ready(path, _native.vocab_size(path), None)


def _measure(tokenizer: Tokenizer, sample: _Sample) -> Facts:
    counts = Counter[int]()
    for encoding in tokenizer.encode_batch_fast(sample.first_texts):
        counts.update(encoding.ids)
    total = counts.total()
    held_out_tokens = _tokens(tokenizer, sample.held_out)
    held_out_words = sum(len(text.split()) for text in sample.held_out)
    gpt2_tokens = _tokens(gpt2, sample.held_out) if (gpt2 := _cached_gpt2()) else None
    return Facts(
        documents=sample.documents,
        bytes=sample.bytes,
        tokens_per_document=total / len(sample.first_texts),
        unigram_entropy=-sum(count / total * math.log(count / total) for count in counts.values()),
        held_out_bytes=sample.held_out_bytes,
        bytes_per_token=sample.held_out_bytes / held_out_tokens if held_out_tokens else None,
        tokens_per_word=held_out_tokens / held_out_words if held_out_words else None,
        gpt2_bytes_per_token=sample.held_out_bytes / gpt2_tokens if gpt2_tokens else None,
        split_words=sample.long_words.split,
        left_out_characters=sample.long_words.left_out,
    )


def _tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    return sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))


def _cached_gpt2() -> Tokenizer | None:
    """Return GPT-2's tokenizer if it was downloaded before; the network is not used."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    path = try_to_load_from_cache(GPT2, "tokenizer.json")
    if not isinstance(path, str):
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception:  # the library raises bare Exceptions, and a corrupted file in a cache only loses this statistic
        return None


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest if it exists and matches the tokenizer beside it. A failing disk raises its `OSError`."""
    try:
        manifest: dict[str, Any] = parse_json(read_text(folder / MANIFEST))
        digest = hashlib.sha256(read_bytes(folder / "tokenizer.json")).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError):
        return None
    is_intact = manifest.get("sha256") == digest and manifest["request"]["format_version"] == FORMAT_VERSION
    return manifest if is_intact else None


def _write(folder: Path, tokenizer: Tokenizer, request: Request, facts: Facts) -> None:
    """Write all files to a staging directory, then move them into `folder`, the manifest last.

    A folder without a manifest counts as incomplete.
    """
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with removed(staging_of(folder)) as staging:
            _write_staged(staging, tokenizer, request, facts)
            folder.mkdir(exist_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)
            for path in sorted(staging.iterdir(), key=lambda path: path.name == MANIFEST):
                sync(path)
                path.replace(folder / path.name)
            sync(folder)
        sync(folder.parent)


def _write_staged(staging: Path, tokenizer: Tokenizer, request: Request, facts: Facts) -> None:
    (staging / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _save_model(tokenizer, staging)
    # What AutoTokenizer needs to know besides tokenizer.json.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ROLES,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    _write_json(staging / "tokenizer_config.json", config)
    _write_json(staging / "special_tokens_map.json", ROLES)
    manifest = {
        "request": asdict(request),
        "vocab_size": tokenizer.get_vocab_size(),
        "facts": asdict(facts),
        "sha256": hashlib.sha256((staging / "tokenizer.json").read_bytes()).hexdigest(),
    }
    _write_json(staging / MANIFEST, manifest)


def _save_model(tokenizer: Tokenizer, folder: Path) -> None:
    """Write vocab.json and merges.txt. Raises an `OSError` where the library raises a bare `Exception`."""
    try:
        tokenizer.model.save(str(folder))
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
