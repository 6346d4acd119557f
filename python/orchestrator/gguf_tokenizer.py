"""Writes a tokenizer.json into a GGUF file: tokens, merges or scores, and the name of its pre-tokenization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import model_tokenizer
from orchestrator.command_error import CommandError
from orchestrator.exported_model import Model
from orchestrator.model_tokenizer import ModelTokens
from orchestrator.paths import shown

if TYPE_CHECKING:
    from gguf import GGUFWriter

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
OTHERS_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}": "llama-bpe",
    rf"{WORDS}|\p{{N}}|{OTHERS}": "qwen2",
    rf"{CASED}|\p{{N}}|{OTHERS_WITH_SLASHES}": "tekken",
}
"""llama.cpp's names of pre-tokenizers, by the regular expression that splits text before BPE."""
SPACE = "\u2581"


def add(writer: GGUFWriter, model: Model) -> list[str]:
    """Add the tokenizer of a model; ids below the vocabulary's size without a token get an unused one.

    Returns:
        What the file cannot express, a sentence each.
    """
    path, tokens = model.tokenizer_folder / model_tokenizer.FILE, model.tokens
    vocab_size = model.checked_config["vocab_size"]
    if tokens is None:
        raise CommandError(f"a GGUF file needs the model's {shown(path)}, and there is none")
    tokenizer = tokens.tokenizer_json
    kind = tokenizer["model"].get("type") or "BPE"
    if kind != "BPE":
        raise CommandError(f"{shown(path)} is a {kind} tokenizer; only BPE is exported to GGUF")
    if tokenizer["model"].get("byte_fallback"):
        _add_sentencepiece(writer, tokenizer, vocab_size, path)
    else:
        _add_byte_level(writer, tokenizer, vocab_size, path)
    return _add_special_tokens(writer, tokens, model.generation.get("pad_token_id"))


def _add_byte_level(writer: GGUFWriter, tokenizer: dict[str, Any], vocab_size: int, path: Path) -> None:
    pre = _pre_tokenizer(tokenizer.get("pre_tokenizer") or {}, bool(tokenizer["model"].get("ignore_merges")))
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if pre is None or normalizer not in (None, "NFC"):  # text that is in NFC, as most is, stays as it is
        raise _uncommon_pipeline(path, tokenizer)
    tokens, types = _tokens(tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def _add_sentencepiece(writer: GGUFWriter, tokenizer: dict[str, Any], vocab_size: int, path: Path) -> None:
    """Add a BPE with byte tokens: llama.cpp merges the pair with the highest score, so a score is minus the rank."""
    from gguf import TokenType

    adds_space = _adds_space(tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {})
    if adds_space is None:
        raise _uncommon_pipeline(path, tokenizer)
    tokens, types = _tokens(tokenizer, vocab_size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(tokenizer["model"]["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    unknown = tokenizer["model"].get("unk_token")
    for index, token in enumerate(tokens):
        if token == unknown:
            types[index] = TokenType.UNKNOWN
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = TokenType.BYTE
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
    writer.add_token_types(types)
    writer.add_add_space_prefix(adds_space)


def _tokens(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return every id's token and type."""
    from gguf import TokenType

    added_tokens = tokenizer.get("added_tokens") or []
    tokens, types = [f"[PAD{index}]" for index in range(vocab_size)], [int(TokenType.UNUSED)] * vocab_size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = token, int(TokenType.NORMAL)
    for added in added_tokens:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    return tokens, types


def _pre_tokenizer(pre_tokenizer: dict[str, Any], ignores_merges: bool) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer, None if it has none.

    Args:
        pre_tokenizer: The section `pre_tokenizer` of tokenizer.json.
        ignores_merges: The key `ignore_merges`: a word that is in the vocabulary becomes that token without merges.
    """
    parts = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    if parts[-1].get("use_regex", True):  # GPT-2's expression, perhaps after digits were cut off one by one
        if parts[:-1] == [{"type": "Digits", "individual_digits": True}]:
            return "smollm"
        return None if parts[:-1] else "gpt-2"
    match parts[:-1]:
        case [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}]:
            name = PRE_TOKENIZERS.get(expression)
        case _:
            return None
    return "smaug-bpe" if name == "llama-bpe" and not ignores_merges else name


def _adds_space(normalizer: dict[str, Any], pre_tokenizer: dict[str, Any]) -> bool | None:
    """Whether a text gets a space in front; None if spaces are written in a way that llama.cpp does not know.

    Llama 2 puts it there by its normalizer, newer models by a pre-tokenizer that does not split.
    """
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    match normalizer.get("normalizers") or [normalizer], pre_tokenizer:
        case [first, second], {} if (first, second, pre_tokenizer) == (prepend, replace, {}):
            return True
        case [one], {} if (one, pre_tokenizer) == (replace, {}):
            return False
        case [{}], {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False} if (
            not normalizer
        ):
            return bool(scheme != "never")
    return None


def _uncommon_pipeline(path: Path, tokenizer: dict[str, Any]) -> CommandError:
    parts = {name: tokenizer.get(name) for name in ("normalizer", "pre_tokenizer")}
    return CommandError(f"{shown(path)} cuts text in a way that llama.cpp has no name for: {json.dumps(parts)}")


def _add_special_tokens(writer: GGUFWriter, tokens: ModelTokens, pad: Any) -> list[str]:
    """Add the tokens with a role, those at which `orchestrate chat` stops, and the chat templates."""
    ids = tokens.ids()
    of_role = {role: ids[token] for role, token in tokens.roles.items() if token in ids}
    stops = tokens.all_stop_tokens()
    eos = of_role.get("eos_token")
    if stops and eos not in stops:
        eos = stops[0]
    others = sorted((stop for stop in stops if stop != eos), key=lambda stop: stop != tokens.end_of_turn)
    adders = [
        (writer.add_bos_token_id, of_role.get("bos_token")),
        (writer.add_eos_token_id, eos),
        (writer.add_pad_token_id, of_role.get("pad_token", pad)),
        (writer.add_unk_token_id, of_role.get("unk_token")),
        *zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False),
    ]
    for add_id, index in adders:
        if isinstance(index, int):
            add_id(index)
    writer.add_add_bos_token(_adds_bos(tokens))
    writer.add_add_eos_token(False)
    templates = tokens.ordered_templates()
    if len(templates) == 1:
        writer.add_chat_template(templates[0][1])
    elif templates:
        writer.add_chat_template([{"name": name, "template": source} for name, source in templates])
    return _what_is_lost(tokens, others[2:])


def _what_is_lost(tokens: ModelTokens, stops: list[int]) -> list[str]:
    """Return what a GGUF file cannot express of the tokens, a sentence each; `stops` are more than it has keys for."""
    notes = []
    added = tokens.tokenizer_json.get("added_tokens") or []
    for key, does in (
        ("lstrip", "takes white space before it"), ("rstrip", "takes white space after it"),
        ("single_word", "is found between words only"),
    ):  # fmt: skip
        names = [token["content"] for token in added if token.get(key)]
        if names:
            few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            notes.append(f"GGUF has no {key}: {few} {does} here, not in llama.cpp")
    if stops:
        by_id = {index: name for name, index in tokens.ids().items()}
        stop_names = ", ".join(by_id.get(index, str(index)) for index in stops)
        notes.append(f"GGUF has keys for three tokens that end a text: llama.cpp may not stop at {stop_names}")
    if tokens.left_out:
        notes.append(f"the model has no embedding for {', '.join(tokens.left_out)}: the file leaves them out")
    return notes


def _adds_bos(tokens: ModelTokens) -> bool:
    """Whether texts begin with the BOS token: as conversations do, if the model has a chat template.

    Otherwise as tokenizer_config.json says, else the post-processor. llama.cpp has one switch for conversations and
    other texts, and puts no second BOS in front of a template's own.
    """
    if tokens.conversations_start_with_bos is not None:
        return tokens.conversations_start_with_bos
    if tokens.adds_bos is not None:
        return tokens.adds_bos
    processor = tokens.tokenizer_json.get("post_processor") or {}
    for part in processor.get("processors") or [processor]:
        if part.get("type") == "TemplateProcessing":
            first = part["single"][0].get("SpecialToken") or {}
            return first.get("id") is not None and first.get("id") == tokens.roles.get("bos_token")
    return False
