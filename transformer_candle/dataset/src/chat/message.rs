//! Checks a message of a conversation, and reads whether the loss counts it.

use run_config::FIRST_READING_VERSION;
use serde_json::{Map, Value};

use super::conversation::{ASSISTANT, RowProblem, THOUGHTS};
use crate::skipped_rows::SkipReason;

/// The roles that a message may have.
const ROLES: [&str; 9] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython", "environment", "observation"];
/// The keys by which axolotl says whether a turn is trained on.
pub(super) const TRAINING_FLAGS: [&str; 2] = ["train", "training"];
/// The key by which `OpenAI` says for fine-tuning whether a turn is trained on.
pub(super) const WEIGHT: &str = "weight";

/// Whether the loss counts a message of the assistant: `weight`, 0 or 1, as `OpenAI` has it for fine-tuning, or
/// `train` as axolotl has it. The text of an error continues "message 1".
pub(super) fn counts(message: &Value) -> Result<bool, RowProblem> {
    let invalid = |message| Err(RowProblem::new(SkipReason::InvalidWeight, message));
    for name in TRAINING_FLAGS {
        match &message[name] {
            Value::Null => {}
            Value::Bool(counts) => return Ok(*counts),
            other => return invalid(format!("has a `{name}` that is {other}; it must be true or false")),
        }
    }
    match &message[WEIGHT] {
        Value::Null => Ok(true),
        weight => match weight.as_f64() {
            Some(0.0) => Ok(false),
            Some(1.0) => Ok(true),
            _ => invalid(format!("has the weight {weight}; it must be 0 or 1")),
        },
    }
}

/// Renames `from` and `value` to `role` and `content`, with the roles that chat templates know.
pub(super) fn rename_fields(fields: &mut Map<String, Value>) {
    for (name, usual) in [("from", "role"), ("value", "content")] {
        if !fields.contains_key(usual)
            && let Some(value) = fields.remove(name)
        {
            let value = match value.as_str() {
                Some("human") if usual == "role" => "user".into(),
                Some("gpt") if usual == "role" => ASSISTANT.into(),
                _ => value,
            };
            fields.insert(usual.to_owned(), value);
        }
    }
}

/// Checks a message and renames `from` and `value` to `role` and `content`; an error's text continues "message 1".
pub(super) fn check(message: &mut Value, reading_version: u32) -> Result<(), RowProblem> {
    let problem = |reason, message: String| Err(RowProblem::new(reason, message));
    let Value::Object(fields) = message else {
        return problem(SkipReason::NotConversation, "is no object with a role and a content".to_owned());
    };
    rename_fields(fields);
    let role = match fields.get("role") {
        None | Some(Value::Null) => return problem(SkipReason::UnknownRole, "has no role".to_owned()),
        Some(role) => role.as_str().filter(|role| ROLES.contains(role)).ok_or_else(|| {
            let message = format!("has the role {role}, which is none of {}", ROLES.join(", "));
            RowProblem::new(SkipReason::UnknownRole, message)
        })?,
    };
    let calls = fields.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    let thinks = reading_version > FIRST_READING_VERSION
        && THOUGHTS.iter().any(|name| fields.get(*name).and_then(Value::as_str).is_some_and(|text| !text.is_empty()));
    let must_speak = (role == "user" || role == ASSISTANT) && !calls && !thinks;
    match fields.get("content") {
        Some(Value::String(text)) if must_speak && text.trim().is_empty() => {
            problem(SkipReason::EmptyMessage, format!("({role}) is empty"))
        }
        Some(Value::Array(parts)) => check_parts(parts),
        None | Some(Value::Null) if must_speak => problem(SkipReason::EmptyMessage, format!("({role}) has no content")),
        None | Some(Value::Null | Value::String(_)) => Ok(()),
        Some(_) => {
            problem(SkipReason::NotText, format!("({role}) has a content that is neither a text nor a list of parts"))
        }
    }
}

fn check_parts(parts: &[Value]) -> Result<(), RowProblem> {
    match parts.iter().find(|part| part["type"] != "text" || !part["text"].is_string()) {
        Some(part) => {
            let kind = part["type"].as_str().unwrap_or("unknown");
            let message = format!("has a part of the type {kind}: only text can be trained on");
            Err(RowProblem::new(SkipReason::NotText, message))
        }
        None if parts.is_empty() => Err(RowProblem::new(SkipReason::EmptyMessage, "has a content without parts")),
        None => Ok(()),
    }
}
