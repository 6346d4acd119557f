"""Tokenizers are trained on text with words of any length, in time and memory that its bytes bound."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from fake_hub.fineweb import documents
from orchestrator import long_words, tokenizer
from orchestrator.long_words import LONGEST_WORD, LongWords
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from workspace import TINY_MODEL, Workspace

SIZE = 400_000
ATOMS = [
    "a", "Bc", "1", " ", "  ", "\n", "\t", "=", "'s", "'", "'ll", "'re", "\u00e4", "\u4e2d", "\u3002", "\x1c", "\x85",
    "\u2003", "\u00b2", "f" * 18, "=" * 9, " " * 9, "\u4e2d" * 9, "7" * 9,
]  # fmt: skip


def byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def draw_from(letters: str) -> Callable[[int], str]:
    return lambda size: "".join(random.Random(size).choices(letters, k=size))


KINDS: dict[str, Callable[[int], str]] = {
    "spaces": lambda size: "name" + " " * size + "value",
    "rule": lambda size: "=" * size,
    "dna": draw_from("ACGT"),
    "base64": draw_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"),
    "cjk": draw_from("".join(map(chr, range(0x4E00, 0x5200)))),
}


class Silent:
    """Hears the progress of a training and says nothing."""

    def advance(self, share: float, documents: int, size: int) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


def request(size: int = 600) -> tokenizer.Request:
    source = {"name": "made", "text_column": "text"}
    return tokenizer.Request(size, list(tokenizer.SPECIAL_TOKENS), source, max_documents=100_000, seed=None)


def words(text: str) -> list[str]:
    """The words of a text, as the pre-tokenizer divides it, without the white space that belongs to them."""
    return [text[first:last] for _, (first, last) in byte_level().pre_tokenize_str(text)]


def test_only_words_that_are_too_long_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_words, "LONGEST_WORD", 16)
    monkeypatch.setattr(long_words, "COUNTED_LENGTH", 6)
    monkeypatch.setattr(long_words, "_RUNS", long_words.runs(6, 16))
    draw = random.Random(1)
    for _ in range(4000):
        text = "".join(draw.choices(ATOMS, k=draw.randint(1, 30)))
        parts = list(LongWords(byte_level()).parts(text))
        assert "".join(parts) == text
        expected = [word[at : at + 16].strip() for word in words(text) for at in range(0, len(word), 16)]
        actual = [word.strip() for part in parts for word in words(part)]
        assert list(filter(None, actual)) == list(filter(None, expected)), text
        assert len(parts) == 1 or max(map(len, words(text))) > 16, text


def by_the_library(texts: list[str], size: int) -> str:
    """The tokenizer.json that the library makes of all of the texts as they are."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = byte_level(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(tokenizer.SPECIAL_TOKENS), min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    own.train_from_iterator(texts, trainer)
    return str(own.to_str(pretty=True))


def test_ordinary_text_gives_the_library_s_tokenizer(tmp_path: Path) -> None:
    texts = [*islice(documents(), 60), "\u4e2d\u6587\u3002" * 300, "x = 1\n" + "-" * 79]
    ready = tokenizer.train(tmp_path / "made", request(), iter(texts), Silent())
    training_texts = [text for number, text in enumerate(texts, start=1) if number % tokenizer.HELD_OUT_EVERY]
    assert ready.path.read_text(encoding="utf-8") == by_the_library(training_texts, 600)
    assert ready.facts is not None
    assert (ready.facts.split_words, ready.facts.left_out_characters) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_any_length_is_trained_on_in_pieces(tmp_path: Path, kind: str) -> None:
    text = KINDS[kind](SIZE // 10)
    parts = list(LongWords(byte_level()).parts(text))
    assert "".join(parts) == text
    assert max(len(word) for part in parts for word in words(part)) <= LONGEST_WORD
    ready = tokenizer.train(tmp_path / "made", request(400), iter(["ordinary text " * 9, text]), Silent())
    assert ready.facts is not None
    assert ready.facts.split_words == (0 if kind == "base64" else 1)
    manifest = json.loads((tmp_path / "made" / tokenizer.MANIFEST).read_text())
    assert manifest["facts"]["split_words"] == ready.facts.split_words
    assert Tokenizer.from_file(str(ready.path)).decode(Tokenizer.from_file(str(ready.path)).encode(text).ids) == text


def test_too_many_different_long_words_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_words, "LARGEST_VARIETY", 5000)
    splitter = LongWords(byte_level())
    lines = [draw_from("abcdefgh")(64 + number) for number in range(200)]
    parts = list(splitter.parts("\n".join(lines)))
    assert splitter.variety < 5200
    assert splitter.left_out == sum(map(len, lines)) - sum(len(part.replace("\n", "")) for part in parts)
    assert splitter.left_out > 20_000
    repeated_line = f"{lines[0]} again"
    assert list(splitter.parts(repeated_line)) == [repeated_line], "what is known takes no more memory"


def test_a_long_word_is_told_and_its_tokenizer_reused(workspace: Workspace) -> None:
    text = workspace.root / "text.jsonl"
    rows = [{"text": document} for document in islice(documents(), 40)]
    rows[7]["text"] = KINDS["spaces"](SIZE)
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: list[str | Path] = [*TINY_MODEL, "--input", text, "--launch=none", "--experiment=long"]
    output = workspace.orchestrate(*flags).succeeded().out
    assert f"1 word of more than {LONGEST_WORD} characters" in output
    assert "merging pairs of tokens" in output
    assert "trained before" in workspace.orchestrate(*flags).succeeded().out


def test_manifests_without_long_words_are_read(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from islice(documents(), 20)

    tokenizer.train(tmp_path / "made", request(), texts(), Silent())
    manifest = tmp_path / "made" / tokenizer.MANIFEST
    former = json.loads(manifest.read_text())
    for fresh in ("split_words", "left_out_characters"):
        del former["facts"][fresh]
    manifest.write_text(json.dumps(former))
    assert tokenizer.reuse(tmp_path / "made", request()) is not None
