//! Finds text that spells special tokens, such as a conversation that a chat template has rendered before.

use std::sync::{Arc, Once};

use aho_corasick::AhoCorasick;
use serde_json::Value;

/// The special tokens that a text may spell. Clones share the memory of what was told.
#[derive(Clone)]
pub(crate) struct SpelledTokens(Arc<State>);

struct State {
    /// Finds any of the names; `None` if there are none.
    automaton: Option<AhoCorasick>,
    names: Vec<String>,
    warning: Once,
}

impl SpelledTokens {
    /// Returns the tokens that a `tokenizer.json` marks as special. Those whose name is a plain word are left out: text
    /// that holds the word does not spell a token.
    pub(super) fn of_tokenizer_json(tokenizer_json: &Value) -> Self {
        let added = tokenizer_json["added_tokens"].as_array().into_iter().flatten();
        let special = added.filter(|token| token["special"] == true).filter_map(|token| token["content"].as_str());
        let is_word =
            |name: &&str| name.chars().all(|character| character.is_alphanumeric() || character.is_whitespace());
        let names: Vec<String> = special.filter(|name| !is_word(name)).map(str::to_owned).collect();
        let automaton = AhoCorasick::new(&names).ok().filter(|_| !names.is_empty());
        Self(Arc::new(State { automaton, names, warning: Once::new() }))
    }

    /// Returns the first special token that a text spells.
    pub(crate) fn find(&self, text: &str) -> Option<&str> {
        let name_match = self.0.automaton.as_ref()?.find(text)?;
        Some(&self.0.names[name_match.pattern()])
    }

    /// Whether a text spells a special token; warns of the first that does, with what becomes of it.
    pub(crate) fn tell(&self, text: &str, consequence: impl FnOnce() -> &'static str) -> bool {
        let name = self.find(text);
        if let Some(name) = name {
            self.0.warning.call_once(|| tracing::warn!("the data spells the special token {name}, {}", consequence()));
        }
        name.is_some()
    }
}

/// Says what becomes of special tokens that the data spells, and what changes it.
pub(crate) fn consequence(is_parsed: bool) -> &'static str {
    if is_parsed {
        "which becomes that token; with data.parse_special_tokens=false it is trained as characters"
    } else {
        "which is trained as characters; with data.parse_special_tokens=true it becomes that token, as in transformers"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn special_tokens_are_found_but_words_are_not() {
        let token = |name: &str, special: bool| json!({"content": name, "special": special});
        let added = [token("<|im_end|>", true), token("user", true), token("<think>", false), token("<s>", true)];
        let spelled_tokens = SpelledTokens::of_tokenizer_json(&json!({"added_tokens": added}));
        for (text, expected) in [
            ("a <|im_end|> b", Some("<|im_end|>")),
            ("<s>x<|im_end|>", Some("<s>")),
            ("the user <think> <|im_end |>", None),
            ("", None),
        ] {
            assert_eq!(spelled_tokens.find(text), expected, "{text}");
        }
        assert_eq!(SpelledTokens::of_tokenizer_json(&json!({})).find("<s>"), None);
    }
}
