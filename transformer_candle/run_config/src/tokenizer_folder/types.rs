//! Checks that the files of a tokenizer's folder have values of the types that are read: a value of another type would
//! be left out, and a token with it.

use serde_json::{Map, Value};

use super::{ADDED_TOKENS_DECODER, ROLES};

/// The flags of a token that is an object.
const FLAGS: [&str; 5] = ["single_word", "lstrip", "rstrip", "normalized", "special"];

/// A value of the wrong type: its key, and what it must be.
type Problem = (String, &'static str);

/// Returns what is wrong with a `tokenizer_config.json` or `special_tokens_map.json`.
pub(super) fn of_roles(config: &Map<String, Value>) -> Option<String> {
    let values = config.iter().filter(|(_, value)| !value.is_null());
    let mut problems = values.filter_map(|(key, value)| match key.as_str() {
        "add_bos_token" => (!value.is_boolean()).then(|| (key.clone(), "true or false")),
        "additional_special_tokens" => tokens_in(key, value, false),
        "extra_special_tokens" => tokens_in(key, value, true),
        ADDED_TOKENS_DECODER => added_tokens_in(key, value),
        "chat_template" => template_in(key, value),
        role if ROLES.contains(&role) => token(key, value),
        // Other keys may end like a role and be none, such as the flag `add_eos_token`.
        role if role.ends_with("_token") && (value.is_object() || value.is_array()) => token(key, value),
        _ => None,
    });
    problems.next().map(message)
}

/// Returns what is wrong with an `added_tokens.json`.
pub(super) fn of_added_tokens(file: &Map<String, Value>) -> Option<String> {
    let wrong = file.iter().find(|(_, id)| !id.is_u64());
    wrong.map(|(token, _)| message((token.clone(), "the id of the token, an integer")))
}

/// Returns what is wrong with the token ids of a `generation_config.json` or `config.json`. Ids below 0 stand for none.
pub fn wrong_token_ids(config: &Value) -> Option<String> {
    let is_id = |id: &Value| id.is_i64() || id.is_u64();
    let mut wrong = ["bos_token_id", "eos_token_id"].into_iter().filter(|key| match &config[*key] {
        Value::Null => false,
        Value::Array(ids) => !ids.iter().all(is_id),
        id => !is_id(id),
    });
    wrong.next().map(|key| message((key.to_owned(), "an integer or a list of integers")))
}

fn message((key, expected): Problem) -> String {
    format!("`{key}` must be {expected}: correct it, or remove it")
}

fn token(key: &str, value: &Value) -> Option<Problem> {
    let fields = match value {
        Value::String(_) => return None,
        Value::Object(fields) if fields.get("content").is_some_and(Value::is_string) => fields,
        Value::Object(_) => return Some((format!("{key}.content"), "a string")),
        _ => return Some((key.to_owned(), "a string, or an object whose `content` is one")),
    };
    let wrong = FLAGS.into_iter().find(|flag| fields.get(*flag).is_some_and(|set| !set.is_boolean() && !set.is_null()));
    wrong.map(|flag| (format!("{key}.{flag}"), "true or false"))
}

fn tokens_in(key: &str, value: &Value, may_have_roles: bool) -> Option<Problem> {
    match value {
        Value::Array(tokens) => {
            tokens.iter().enumerate().find_map(|(index, value)| token(&format!("{key}[{index}]"), value))
        }
        Value::Object(tokens_by_role) if may_have_roles => {
            tokens_by_role.iter().find_map(|(role, value)| token(&format!("{key}.{role}"), value))
        }
        _ => Some((key.to_owned(), "a list of tokens")),
    }
}

fn added_tokens_in(key: &str, value: &Value) -> Option<Problem> {
    let Value::Object(tokens) = value else {
        return Some((key.to_owned(), "an object of tokens by their ids"));
    };
    tokens.iter().find_map(|(id, value)| {
        let path = format!("{key}.{id}");
        if id.parse::<u64>().is_err() { Some((path, "named by an id, an integer")) } else { token(&path, value) }
    })
}

fn template_in(key: &str, value: &Value) -> Option<Problem> {
    let is_right = match value {
        Value::String(_) => true,
        Value::Array(templates) => {
            templates.iter().all(|template| template["name"].is_string() && template["template"].is_string())
        }
        Value::Object(templates) => templates.values().all(Value::is_string),
        _ => false,
    };
    (!is_right).then(|| (key.to_owned(), "a string, or a list of objects with the strings `name` and `template`"))
}
