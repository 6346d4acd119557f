"""Splits over-long words before a tokenizer is trained on them, and limits how many it is trained on.

A word is what the pre-tokenizer does not divide: a run of letters, of digits, of other characters or of white space.
The trainer's time grows with the square of a word's length, and it holds every different word at some hundred bytes
per byte. Ordinary text has no word that is long enough for either to matter. DNA, base64, minified code and rules of
`=` do. Only training splits words: encoding never does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

LONGEST_WORD = 512
"""Characters of a word at most; a longer one is trained on in pieces of so many."""
COUNTED_LENGTH = 48
"""Characters from which on text without a break counts towards `LARGEST_VARIETY`."""
LARGEST_VARIETY = 8_000_000
"""Bytes of different words in such text. The trainer takes about 100 bytes for each."""
# Python counts four separators as white space, which the pre-tokenizer does not.
_SPACE, _OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"


def runs(counted: int, longest: int) -> re.Pattern[str]:
    """Match text without white space, which may be several words, and white space of over `longest` characters."""
    return re.compile(rf"(?<!{_OTHER}){_OTHER}{{{counted},}}|(?<!{_SPACE}){_SPACE}{{{longest + 1},}}")


_RUNS = runs(COUNTED_LENGTH, LONGEST_WORD)
_ASCII_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9 ]+")


class PreTokenizer(Protocol):
    """The part of the tokenizer that divides text into words."""

    def pre_tokenize_str(self, sequence: str) -> list[tuple[str, tuple[int, int]]]:
        """Return the words and the characters from which to which each goes."""


@dataclass
class LongWords:
    """Divides documents where a word is too long, and leaves out long words that are one too many."""

    pre_tokenizer: PreTokenizer
    split: int = 0
    """Words that were split."""
    left_out: int = 0
    """Characters that were not trained on."""
    variety: int = 0
    """Bytes of the different long words so far."""
    _seen: set[int] = field(default_factory=set)

    def parts(self, text: str) -> Iterator[str]:
        """Yield a document in parts, each to be pre-tokenized on its own. Nearly every document is one part.

        Their words are those of the document, but for the words that are too long and white space before them.
        """
        begin = 0
        for start, end, is_trained_on in self._cuts(text):
            if begin < start:
                yield text[begin:start]
            if is_trained_on:
                self.split += 1
                yield from (text[piece : min(piece + LONGEST_WORD, end)] for piece in range(start, end, LONGEST_WORD))
            else:
                self.left_out += end - start
            begin = end
        if begin < len(text):
            yield text[begin:]

    def _cuts(self, text: str) -> Iterator[tuple[int, int, bool]]:
        """Yield from where to where text is not trained on as it is, and whether it is at all."""
        for run in _RUNS.finditer(text):
            start, end = run.span()
            if text[start - 1 : start] == " ":  # of the word that follows it
                start -= 1
            if run[0].isspace():
                # The last character of white space before text belongs to the next word, or is one of its own.
                words = [(start, end if end == len(text) else end - 1)]
            elif run[0].isascii():
                if not self._has_room_for(set(_ASCII_WORDS.findall(text, start, end))):
                    yield start, end, False
                    continue
                words = []
                if _is_long(text[start:end]):
                    words = [word.span() for word in _ASCII_WORDS.finditer(text, start, end)]
            else:
                # Ordinary text of scripts without spaces has no breaks either: only its long words count.
                spans = self.pre_tokenizer.pre_tokenize_str(text[start:end])
                words = [(start + first, start + last) for _, (first, last) in spans if last - first >= COUNTED_LENGTH]
            for first, last in words:
                is_trained_on = run[0].isascii() or self._has_room_for({text[first:last]})
                if last - first > LONGEST_WORD or not is_trained_on:
                    yield first, last, is_trained_on

    def _has_room_for(self, words: set[str]) -> bool:
        """Whether words are known, or few enough are known that these can be remembered."""
        fresh = {name: len(word.encode()) for word in words if (name := hash(word)) not in self._seen}
        if fresh and self.variety >= LARGEST_VARIETY:
            return False
        self._seen.update(fresh)
        self.variety += sum(fresh.values())
        return True


def _is_long(run: str) -> bool:
    return len(run) > LONGEST_WORD and max(map(len, _ASCII_WORDS.findall(run))) > LONGEST_WORD
