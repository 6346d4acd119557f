//! `tokenizer`: the tokenizer and its special tokens.

use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The tokenizer and its special tokens. Default: the tokenizer that `streaming_config.json` beside the
/// config names.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizerConfig {
    /// The `tokenizer.json` of the Hugging Face tokenizers library. Default: the run's own,
    /// `tokenizer/tokenizer.json` in its folder; else that of `model.init_from`; else the one that
    /// `streaming_config.json` names, else `artifacts/tokenizer/EXPERIMENT/tokenizer.json`.
    pub tokenizer_json: Option<PathBuf>,
    /// `vocab.json` of a byte-level BPE, instead of `tokenizer_json`: the `tokenizer.json` in the same
    /// folder is read.
    pub vocab: Option<PathBuf>,
    /// `merges.txt` of a byte-level BPE, given together with `vocab`.
    pub merges: Option<PathBuf>,
    /// Tokens that are never split: a list, or a file with a JSON array or one token per line. Each
    /// must be in the tokenizer's vocabulary. Default: `special_tokens.txt` beside the config, else
    /// the tokenizer's own special tokens.
    pub special_tokens: Option<SpecialTokens>,
}

/// Special tokens: in the config, or in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SpecialTokens {
    /// The tokens themselves.
    List(Vec<String>),
    /// A file with a JSON array of strings, or one token per line.
    File(PathBuf),
}

impl JsonSchema for SpecialTokens {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "SpecialTokens".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
    }
}
