//! Special tokens of a template, kept apart from the text of messages that spells them.
//!
//! Each special token has a placeholder: its number between two noncharacters of Unicode, which no message may contain.
//! Before a template is rendered, its special tokens are replaced by their placeholders; in the tokenizer that encodes
//! the result, the special tokens keep their ids and are named by their placeholders. So a special token comes from the
//! template or not at all, and everything else about the tokenizer stays as it is: what it strips beside a token, how
//! it treats the start of a text.
//!
//! A template that puts a token together from parts (`'<|' + role + '|>'`) has no literal to replace. Tokens that it
//! renders for messages without any are looked for in the rendered text instead; those that messages spell are broken
//! up while it is rendered.

use std::collections::HashSet;

use serde_json::Value;

use crate::tokenizer::NamedToken;

/// Characters that no message may contain.
pub(super) const RESERVED: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdd4}';
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';
/// Inserted into a special token that a message spells, until the message is rendered.
const BREAK: char = '\u{fdd2}';
/// Appended to turns that the loss leaves out, to find them in what the template marks. No placeholder is like it.
pub(super) const LEFT_OUT: &str = "\u{fdd0}left out\u{fdd1}";
/// Marks of the start and the end of what the assistant says, for templates with `{% generation %}`.
pub(super) const GENERATION: [char; 2] = ['\u{fdd3}', '\u{fdd4}'];

/// The special tokens of a tokenizer, the longest first: one may start with another.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecialTokens {
    tokens: Vec<NamedToken>,
    /// Indices of the tokens that the template assembles from parts.
    assembled: Vec<usize>,
}

impl SpecialTokens {
    /// Returns the tokens that a `tokenizer.json` marks as special.
    pub(super) fn from_tokenizer_json(tokenizer_json: &Value) -> Self {
        let added = tokenizer_json["added_tokens"].as_array().into_iter().flatten();
        let special = added.filter(|token| token["special"] == true).filter_map(|token| {
            let id = u32::try_from(token["id"].as_u64()?).ok()?;
            Some(NamedToken { id, name: token["content"].as_str().filter(|name| !name.is_empty())?.to_owned() })
        });
        let mut tokens: Vec<_> = special.collect();
        tokens.sort_by(|a, b| (b.name.len(), &a.name).cmp(&(a.name.len(), &b.name)));
        Self { tokens, assembled: Vec::new() }
    }

    /// Returns the `tokenizer.json` with special tokens named by their placeholders, and without its post-processor,
    /// which may report offsets that leave out white space. A token that merges of the vocabulary name, such as `!` as the
    /// padding of a model without one, keeps its name as well: text is made of it.
    pub(super) fn renamed(&self, mut tokenizer_json: Value) -> Value {
        let rename = |name: &mut Value| {
            let index = name.as_str().and_then(|name| self.tokens.iter().position(|token| token.name == name));
            if let Some(index) = index {
                *name = placeholder(index).into();
            }
        };
        for token in tokenizer_json["added_tokens"].as_array_mut().into_iter().flatten() {
            if token["special"] == true {
                rename(&mut token["content"]);
            }
        }
        let merged = self.merged(&tokenizer_json["model"]["merges"]);
        let model = &mut tokenizer_json["model"];
        if let Some(unknown) = model.get_mut("unk_token") {
            rename(unknown);
        }
        for (index, token) in self.tokens.iter().enumerate() {
            match model.get_mut("vocab") {
                Some(Value::Object(vocab)) => {
                    let is_merged = merged.contains(token.name.as_str());
                    let id = if is_merged { vocab.get(&token.name).cloned() } else { vocab.shift_remove(&token.name) };
                    if let Some(id) = id {
                        vocab.insert(placeholder(index), id);
                    }
                }
                // Unigram: pairs of token and score, in the order of the ids.
                Some(Value::Array(vocab)) => {
                    let own = vocab.iter_mut().filter(|pair| pair[0] == token.name.as_str());
                    own.for_each(|pair| pair[0] = placeholder(index).into());
                }
                _ => {}
            }
        }
        tokenizer_json["post_processor"] = Value::Null;
        tokenizer_json
    }

    /// Returns the names of special tokens that merges join or result in.
    fn merged(&self, merges: &Value) -> HashSet<&str> {
        let names: HashSet<&str> = self.tokens.iter().map(|token| token.name.as_str()).collect();
        let mut merged = HashSet::new();
        for merge in merges.as_array().into_iter().flatten() {
            let parts = match merge {
                Value::String(pair) => pair.split_once(' '),
                pair => pair[0].as_str().zip(pair[1].as_str()),
            };
            let Some((left, right)) = parts else { continue };
            merged.extend([left, right, &format!("{left}{right}")].iter().filter_map(|part| names.get(*part)));
        }
        merged
    }

    /// Replaces the special tokens that a text spells by their placeholders. Tokens without punctuation are left as
    /// they are: such a word may be part of a template's program.
    pub(super) fn with_placeholders(&self, text: &str) -> String {
        let has_punctuation = |(index, token): (usize, &NamedToken)| {
            token.name.chars().any(|character| !character.is_alphanumeric()).then_some(index)
        };
        let indices: Vec<usize> = self.tokens.iter().enumerate().filter_map(has_punctuation).collect();
        self.replace(text, &indices, &mut |index, _, output| output.push_str(&placeholder(index)))
    }

    /// Replaces every special token that a text spells by its placeholder, so that it is encoded as the token.
    pub(super) fn parsed(&self, text: &str) -> String {
        let all: Vec<usize> = (0..self.tokens.len()).collect();
        self.replace(text, &all, &mut |index, _, output| output.push_str(&placeholder(index)))
    }

    /// Replaces the special tokens that the strings of a message spell by their placeholders.
    pub(super) fn parse(&self, value: &mut Value) {
        visit_strings(value, &mut |text| *text = self.parsed(text));
    }

    /// Replaces the placeholders in a text by the names of their tokens.
    pub(super) fn with_names(&self, text: &str) -> String {
        self.tokens.iter().enumerate().fold(text.to_owned(), |text, (index, token)| {
            if text.contains(OPEN) { text.replace(&placeholder(index), &token.name) } else { text }
        })
    }

    /// Finds the tokens that the template assembles from parts, in what it renders for messages without special tokens.
    pub(super) fn find_assembled(&mut self, rendered: &str) {
        let all: Vec<usize> = (0..self.tokens.len()).collect();
        let mut assembled = Vec::new();
        self.replace(rendered, &all, &mut |index, _, _| assembled.push(index));
        assembled.sort_unstable();
        assembled.dedup();
        self.assembled = assembled;
    }

    /// Breaks up the special tokens that the strings of a message spell, where the template may assemble such.
    pub(super) fn break_up(&self, value: &mut Value) {
        if self.assembled.is_empty() {
            return;
        }
        visit_strings(value, &mut |text| {
            *text = self.replace(text, &self.assembled, &mut |_, name, output| {
                let mut characters = name.chars();
                output.extend(characters.next());
                output.push(BREAK);
                output.push_str(characters.as_str());
            });
        });
    }

    /// Replaces the tokens that the template assembled in a rendered text by their placeholders, then restores the
    /// tokens that [`Self::break_up`] broke up.
    pub(super) fn finish(&self, rendered: String) -> String {
        if self.assembled.is_empty() {
            return rendered;
        }
        let text =
            self.replace(&rendered, &self.assembled, &mut |index, _, output| output.push_str(&placeholder(index)));
        text.replace(BREAK, "")
    }

    pub(super) fn named(&self, name: &str) -> Option<&NamedToken> {
        self.tokens.iter().find(|token| token.name == name)
    }

    pub(super) fn with_id(&self, id: u32) -> Option<&NamedToken> {
        self.tokens.iter().find(|token| token.id == id)
    }

    /// Returns the text with each token of `among`, the longest first, replaced by what `write` appends.
    fn replace(&self, text: &str, among: &[usize], write: &mut dyn FnMut(usize, &str, &mut String)) -> String {
        let mut output = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let match_index = among.iter().find(|&&index| rest.starts_with(&self.tokens[index].name));
            if let Some(&index) = match_index {
                let name = &self.tokens[index].name;
                write(index, name, &mut output);
                rest = &rest[name.len()..];
            } else {
                output.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
        output
    }
}

/// Calls `change` with every string in a value; names of fields are none.
fn visit_strings(value: &mut Value, change: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(text) => change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| visit_strings(item, change)),
        Value::Object(fields) => fields.values_mut().for_each(|field| visit_strings(field, change)),
        _ => {}
    }
}

fn placeholder(index: usize) -> String {
    format!("{OPEN}{index}{CLOSE}")
}

/// Whether a message contains a reserved character.
pub(super) fn has_reserved(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(|character| RESERVED.contains(&character)),
        Value::Array(items) => items.iter().any(has_reserved),
        Value::Object(fields) => fields
            .iter()
            .any(|(name, field)| name.contains(|character| RESERVED.contains(&character)) || has_reserved(field)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_special_token_of_merges_keeps_its_name_too() {
        let token = |id: u32, name: &str| json!({"id": id, "content": name, "special": true});
        for merges in [json!(["! !", "a b"]), json!([["!", "!"], ["a", "b"]])] {
            let vocab = json!({"!": 0, "a": 1, "b": 2, "!!": 3, "ab": 4, "<end>": 5});
            let added = [token(0, "!"), token(3, "!!"), token(5, "<end>")];
            let tokenizer = json!({"added_tokens": added, "model": {"vocab": vocab, "merges": merges}});
            let renamed = SpecialTokens::from_tokenizer_json(&tokenizer).renamed(tokenizer);
            let vocab = renamed["model"]["vocab"].as_object().unwrap();
            let placeholders = vocab.keys().filter(|name| name.starts_with(OPEN)).count();
            assert_eq!((vocab["!"].as_u64(), vocab["!!"].as_u64(), placeholders), (Some(0), Some(3), 3));
            assert!(!vocab.contains_key("<end>"), "text cannot spell it");
        }
    }
}
