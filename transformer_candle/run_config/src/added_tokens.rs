//! Tokens added to a vocabulary, as the tokenizers library adds them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A token of the vocabulary that text is searched for before it is split, and how it is found there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the properties of a token in tokenizer.json")]
pub struct AddedToken {
    /// The token's text.
    pub content: String,
    /// Whether it is found only where no letter or digit touches it.
    #[serde(default)]
    pub single_word: bool,
    /// Whether it takes the white space on its left with it.
    #[serde(default)]
    pub lstrip: bool,
    /// Whether it takes the white space on its right with it.
    #[serde(default)]
    pub rstrip: bool,
    /// Whether it is looked for in the text after normalization.
    pub normalized: bool,
    /// Whether it is special: left out of decoded text.
    #[serde(default)]
    pub special: bool,
}

impl AddedToken {
    /// A special token without other properties.
    pub(crate) fn special(content: &str) -> Self {
        let content = content.to_owned();
        Self { content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true }
    }

    /// Reads a token as files spell one: its text, or an object with its properties. `None` for another value.
    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        Self::read(value, false)
    }

    /// Reads a token that is special whatever its properties say.
    pub(crate) fn special_from_json(value: &Value) -> Option<Self> {
        Self::read(value, true)
    }

    fn read(value: &Value, is_special: bool) -> Option<Self> {
        match value {
            Value::String(content) => Some(Self::special(content)),
            Value::Object(fields) => {
                let is_set = |name: &str| fields.get(name).and_then(Value::as_bool);
                let special = is_special || is_set("special").unwrap_or(false);
                Some(Self {
                    content: fields.get("content")?.as_str()?.to_owned(),
                    single_word: is_set("single_word").unwrap_or(false),
                    lstrip: is_set("lstrip").unwrap_or(false),
                    rstrip: is_set("rstrip").unwrap_or(false),
                    normalized: is_set("normalized").unwrap_or(!special),
                    special,
                })
            }
            _ => None,
        }
    }
}

/// The tokens of a model's own vocabulary, to which others are added.
pub(crate) trait ModelVocabulary {
    /// Number of its tokens.
    fn len(&self) -> u64;
    /// The id of a token.
    fn id(&self, token: &str) -> Option<u64>;
}

/// Added tokens by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AddedTokens(BTreeMap<u64, AddedToken>);

impl AddedTokens {
    /// Reads the `added_tokens` of a `tokenizer.json`.
    pub(crate) fn from_json(added_tokens: &Value) -> Self {
        let entries = added_tokens.as_array().into_iter().flatten();
        Self(entries.filter_map(|token| Some((token["id"].as_u64()?, AddedToken::from_json(token)?))).collect())
    }

    /// Returns the `added_tokens` of a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Value {
        let entries = self.0.iter().map(|(id, token)| {
            let mut fields = Map::from_iter([("id".to_owned(), (*id).into())]);
            if let Ok(Value::Object(properties)) = serde_json::to_value(token) {
                fields.extend(properties);
            }
            Value::Object(fields)
        });
        entries.collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &AddedToken)> {
        self.0.iter().map(|(id, token)| (*id, token))
    }

    /// Adds tokens: one that the vocabulary has keeps its id and takes the new properties, another gets the next free
    /// id, whatever a file says its id is. Returns those that would get an id of `limit` or more, which are left out.
    pub(crate) fn extend(
        &mut self,
        tokens: impl IntoIterator<Item = AddedToken>,
        model: &dyn ModelVocabulary,
        limit: Option<u64>,
    ) -> Vec<String> {
        let mut next = self.0.keys().next_back().map_or(0, |last| last + 1).max(model.len());
        let mut ids: BTreeMap<String, u64> = self.0.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
        let mut left_out = Vec::new();
        for token in tokens.into_iter().filter(|token| !token.content.is_empty()) {
            let token_id = ids.get(&token.content).copied().or_else(|| model.id(&token.content));
            let id = token_id.unwrap_or(next);
            if token_id.is_none() {
                if limit.is_some_and(|limit| next >= limit) {
                    left_out.push(token.content);
                    continue;
                }
                next += 1;
            }
            ids.insert(token.content.clone(), id);
            self.0.insert(id, token);
        }
        left_out
    }
}
