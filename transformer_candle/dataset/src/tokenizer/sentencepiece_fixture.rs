//! A small tokenizer of SentencePiece's kind, as Llama 2 and Mistral have it: BPE with a token for each byte, and
//! `\u{2581}` for a space.

use serde_json::{Map, Value, json};

const WORDS: [&str; 5] = ["\u{2581}the", "\u{2581}do", "ing", "\u{2581}\u{2581}", "\u{e9}"];

/// The part of the tokenizer that puts a space in front of a text.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// The normalizer, in front of every text.
    Prepend,
    /// The pre-tokenizer, unless the text starts with a space.
    Metaspace,
}

/// Returns a `tokenizer.json` whose post-processor puts `<s>` in front of a text.
pub fn sentencepiece(form: Form) -> Value {
    let bytes = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>"));
    let characters =
        ["\u{2581}", "\u{e9}"].map(str::to_owned).into_iter().chain((b' ' + 1..127).map(|c| char::from(c).to_string()));
    let mut vocab: Map<String, Value> = Map::new();
    let mut merges = Vec::new();
    for token in ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain(bytes).chain(characters) {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    }
    for word in WORDS {
        let mut prefix = String::new();
        for right in word.chars() {
            if !prefix.is_empty() {
                merges.push(json!([prefix, right.to_string()]));
            }
            prefix.push(right);
            let id = vocab.len();
            vocab.entry(prefix.clone()).or_insert(id.into());
        }
    }
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true
        })
    };
    let prepend = json!({ "type": "Sequence", "normalizers": [
        { "type": "Prepend", "prepend": "\u{2581}" },
        { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
    ] });
    let metaspace =
        json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": false });
    let (normalizer, pre_tokenizer) = match form {
        Form::Prepend => (prepend, Value::Null),
        Form::Metaspace => (Value::Null, metaspace),
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}
