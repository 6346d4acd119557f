//! Writes a config as YAML, with what each key means.

use std::fmt::Write;

use serde_json::Value;

use crate::{RunConfig, schema};

/// Widest line of a comment.
const WIDTH: usize = 100;

/// Returns every key of the config as YAML, with its description above it.
pub(crate) fn commented(config: &RunConfig) -> String {
    let value = serde_json::to_value(config).unwrap_or_default();
    let mut text = "# A training run: every key, with what it means. Keys left out take their defaults.\n".to_owned();
    write_section(&mut text, schema::schema(), &value, 0);
    text
}

fn write_section(text: &mut String, schema: &Value, section: &Value, level: usize) {
    let indent = "  ".repeat(level);
    for (key, schema) in schema::properties(schema) {
        let value = section.get(key).unwrap_or(&Value::Null);
        if level == 0 {
            text.push('\n');
        }
        for line in wrap(&description(schema), WIDTH - indent.len() - 2) {
            let _ = writeln!(text, "{indent}# {line}");
        }
        if schema::is_section(schema) {
            let _ = writeln!(text, "{indent}{key}:");
            write_section(text, schema, value, level + 1);
        } else if let (Some(_), Some(items @ [_, ..])) = (schema::item(schema), value.as_array().map(Vec::as_slice)) {
            let _ = writeln!(text, "{indent}{key}:");
            for item in items {
                let _ = writeln!(text, "{indent}  - {}", scalar(item));
            }
        } else {
            let _ = writeln!(text, "{indent}{key}: {}", scalar(value));
        }
    }
}

/// Returns what a key means, and what each of its choices does.
pub(crate) fn description(schema: &Value) -> String {
    let mut text = schema.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (choice, meaning) in schema::choices(schema) {
        let _ = write!(text, " `{choice}`: {meaning}");
    }
    text
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Formats a value in YAML's flow style, such that YAML 1.1 and 1.2 read the same.
pub(crate) fn scalar(value: &Value) -> String {
    match value {
        Value::Number(number) => number.as_f64().filter(|_| number.is_f64()).map_or_else(|| number.to_string(), float),
        Value::String(text) => quoted_if_needed(text),
        Value::Array(items) => format!("[{}]", items.iter().map(scalar).collect::<Vec<_>>().join(", ")),
        Value::Object(keys) => {
            let entries = keys.iter().filter(|(_, value)| !value.is_null() && **value != Value::Array(Vec::new()));
            format!(
                "{{{}}}",
                entries.map(|(key, value)| format!("{key}: {}", scalar(value))).collect::<Vec<_>>().join(", ")
            )
        }
        other => other.to_string(),
    }
}

/// Returns the shortest text that reads back as the same number; YAML 1.1 wants a point before the exponent and a sign
/// in it.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    let point = if digits.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with('-') { "" } else { "+" };
    format!("{digits}{point}e{sign}{exponent}")
}

fn quoted_if_needed(text: &str) -> String {
    let plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.chars().all(|character| character.is_ascii_alphanumeric() || "_-./".contains(character))
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_ascii_lowercase().as_str());
    if plain { text.to_owned() } else { quoted(text) }
}

/// Returns a double-quoted YAML string; what a reader could change or not see is escaped.
fn quoted(text: &str) -> String {
    let mut output = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => output.extend(['\\', character]),
            ' '..='~' => output.push(character),
            _ if character.is_alphanumeric() => output.push(character),
            _ => {
                let _ = write!(output, "\\U{:08x}", character as u32);
            }
        }
    }
    output.push('"');
    output
}
