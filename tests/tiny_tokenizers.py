"""Small tokenizers of the kinds that open models have, with the files beside them, trained by `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "\u2581"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OTHERS_WITH_SLASHES = OTHERS.replace(r"[\r\n]*", r"[\r\n/]*", 1)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
SPLITS = {
    "llama_3": rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}",
    "qwen_2": rf"{WORDS}|\p{{N}}|{OTHERS}",
    "mistral_nemo": rf"{CASED}|\p{{N}}|{OTHERS_WITH_SLASHES}",
}
"""The regular expressions that split text in the tokenizer.json of these models."""
SPECIAL_TOKENS = {
    "gpt_2": ["<|endoftext|>", "<|pad|>"],
    "smollm_2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama_2": ["<unk>", "<s>", "</s>"],
    "mistral": ["<unk>", "<s>", "</s>"],
    "mistral_nemo": ["<unk>", "<s>", "</s>"],
    "llama_3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    "qwen_2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
KINDS = list(SPECIAL_TOKENS)
STARTING_WITH_BOS = {"llama_2", "mistral", "mistral_nemo", "llama_3"}
ROLES: dict[str, dict[str, Any]] = {
    "gpt_2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    "smollm_2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "llama_2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
    "mistral_nemo": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama_3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "qwen_2": {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False},
}
"""The roles of special tokens in tokenizer_config.json."""


def train(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer with the pipeline of this kind."""
    if kind in ("llama_2", "mistral"):
        return _sentencepiece(kind, texts, vocab_size)
    return _byte_level(kind, texts, vocab_size)


def write(tokenizer: Tokenizer, kind: str, folder: Path, **roles: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json; return the former's path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES[kind], **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids as training has them: with BOS where the template says so, and no special token from text."""
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def _byte_level(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama_3"))
    tokenizer.pre_tokenizer = _words(kind)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "qwen_2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = SPECIAL_TOKENS[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind in STARTING_WITH_BOS:
        bos = ROLES[kind]["bos_token"]
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _words(kind: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer, which cuts text into the words that merges do not cross."""
    if kind in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    by_expression = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm_2":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_expression])
    return by_expression


def _sentencepiece(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a BPE with a token per byte; trained on words, as the merges of whole texts would take long."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)
    specials = SPECIAL_TOKENS[kind]
    reserved = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=reserved, limit_alphabet=(vocab_size - 259) // 2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The bytes are ordinary tokens: only while training they were special, for their ids.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(specials)]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if kind == "llama_2":
        prepend = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        tokenizer.normalizer = normalizers.Sequence(prepend)
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer
