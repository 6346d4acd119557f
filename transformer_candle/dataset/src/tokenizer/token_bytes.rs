//! How many bytes of text each token stands for.

use serde_json::Value;
use tokenizers::Tokenizer;

/// The character that stands for a space in the vocabularies of SentencePiece.
const SPACE: &str = "\u{2581}";

/// Returns the UTF-8 bytes of each id, 0 for special tokens; `None` if the length of a token depends on its position,
/// or if the decoder is of another kind than these two:
///
/// - byte-level: each character of a token is one byte of text;
/// - SentencePiece: `\u{2581}` is a space, `<0xAB>` is one byte, and everything else is text.
pub(super) fn token_bytes(tokenizer: &Tokenizer, json: &Value, vocab_size: usize) -> Option<Vec<u32>> {
    let length: fn(&str) -> usize = match kind_of(&json["decoder"])? {
        Kind::ByteLevel => |token| token.chars().count(),
        Kind::SentencePiece { byte_fallback: false } => text_bytes,
        Kind::SentencePiece { byte_fallback: true } => |token| if is_byte(token) { 1 } else { text_bytes(token) },
    };
    let mut bytes = vec![0; vocab_size];
    for (token, id) in tokenizer.get_vocab(false) {
        bytes[id as usize] = length(&token) as u32;
    }
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        bytes[id as usize] = if token.special { 0 } else { token.content.len() as u32 };
    }
    Some(bytes)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    ByteLevel,
    SentencePiece { byte_fallback: bool },
}

fn kind_of(decoder: &Value) -> Option<Kind> {
    let parts = decoder["decoders"].as_array().map_or(std::slice::from_ref(decoder), Vec::as_slice);
    let types: Vec<&str> = parts.iter().map(|part| part["type"].as_str()).collect::<Option<_>>()?;
    if types == ["ByteLevel"] {
        return Some(Kind::ByteLevel);
    }
    let makes_spaces = |part: &Value| match part["type"].as_str() {
        Some("Metaspace") => part["replacement"] == SPACE,
        Some("Replace") => part["pattern"]["String"] == SPACE && part["content"] == " ",
        _ => false,
    };
    // Joining, and removing the space in front of a text, leave the other tokens as they are.
    let keeps_tokens = |part: &Value| match part["type"].as_str() {
        Some("Strip") => part["content"] == " " && part["stop"] == 0,
        kind => matches!(kind, Some("ByteFallback" | "Fuse")),
    };
    let spaces = parts.iter().filter(|part| makes_spaces(part)).count();
    let is_supported = parts.iter().all(|part| makes_spaces(part) || keeps_tokens(part));
    (spaces == 1 && is_supported).then(|| Kind::SentencePiece { byte_fallback: types.contains(&"ByteFallback") })
}

fn text_bytes(token: &str) -> usize {
    token.len() - token.matches(SPACE).count() * (SPACE.len() - 1)
}

/// Whether this is a token of one byte: `<0x00>` to `<0xFF>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}
