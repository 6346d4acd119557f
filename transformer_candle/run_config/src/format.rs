//! Reads config files: parses YAML, TOML and JSON into one kind of value.
//!
//! Limits keep a hostile or mistaken file from taking memory or time: 1 MiB of text, 32 levels, and
//! a budget for YAML's aliases. Numbers that are not finite become the texts `.nan`, `.inf` and
//! `-.inf`, which no number key accepts.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::{DuplicateKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Error as YamlError, UserMessageFormatter};

use crate::error::Problem;
use crate::regular_file;
use crate::system_error::in_words;

/// The format of a config file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.yaml`, `.yml`
    Yaml,
    /// `.toml`
    Toml,
    /// `.json`
    Json,
}

/// Most bytes of a config file.
pub(crate) const LARGEST_CONFIG: u64 = 1 << 20;

/// Most levels of lists and mappings in a config file.
const DEEPEST: usize = 32;

/// Most values of a YAML document, those of aliases counted as often as they are used.
const MOST_VALUES: usize = 50_000;

impl Format {
    /// Returns the format that a file's extension names.
    pub fn from_path(path: &Path) -> Result<Self, Problem> {
        match path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("yaml" | "yml") => Ok(Self::Yaml),
            Some("toml") => Ok(Self::Toml),
            Some("json") => Ok(Self::Json),
            _ => {
                Err(Problem::of_file("the file's name does not say its format")
                    .suggest("name it .yaml, .toml or .json"))
            }
        }
    }
}

/// Reads a text file of at most `largest` bytes.
pub(crate) fn read_text(path: &Path, largest: u64) -> Result<String, Problem> {
    let unreadable = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Problem::of_file("there is no such file"),
        ErrorKind::IsADirectory => Problem::of_file("is a folder, not a file"),
        _ => Problem::of_file(format!("cannot be read: {}", in_words(&error))),
    };
    let mut bytes = Vec::new();
    regular_file::open(path).and_then(|file| file.take(largest + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > largest {
        return Err(Problem::of_file(format!("is larger than the {} MiB that such a file may have", largest >> 20)));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        Problem::of_file(format!("is not UTF-8 text: byte {valid} is not valid")).suggest("save it as UTF-8")
    })?;
    Ok(regular_file::without_byte_order_mark(text))
}

/// Parses a document. What is not a mapping, a list, a string, a number, a boolean or null has no
/// place in a config.
pub(crate) fn parse(text: &str, format: Format) -> Result<Value, Problem> {
    if text.len() as u64 > LARGEST_CONFIG {
        return Err(Problem::of_file("is larger than the 1 MiB that a config may have"));
    }
    let value = match format {
        Format::Yaml => parse_yaml(text),
        Format::Toml => parse_toml(text),
        Format::Json => parse_json(text),
    }?;
    if depth(&value) > DEEPEST {
        return Err(Problem::of_file(format!("is nested more than {DEEPEST} levels deep")));
    }
    Ok(value)
}

fn parse_yaml(text: &str) -> Result<Value, Problem> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: DEEPEST,
            flow_nesting_limit: DEEPEST,
            max_nodes: MOST_VALUES,
            max_events: 4 * MOST_VALUES,
            max_documents: 16,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MOST_VALUES,
            max_replay_stack_depth: 8,
        },
        duplicate_keys: DuplicateKeyPolicy::Error,
        strict_booleans: true,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| match error {
        YamlError::Budget { .. }
        | YamlError::AliasReplayLimitExceeded { .. }
        | YamlError::AliasReplayStackDepthExceeded { .. } => Problem::of_file(format!(
            "holds more than a config may: {DEEPEST} levels, {MOST_VALUES} values with aliases"
        )),
        _ => {
            let message = error.render_with_formatter(&UserMessageFormatter);
            Problem::of_file(format!("is not valid YAML: {message}"))
        }
    })
}

fn parse_toml(text: &str) -> Result<Value, Problem> {
    let table: toml::Table = toml::from_str(text).map_err(|error| {
        let (line, column) = position(text, error.span().map_or(0, |span| span.start));
        Problem::of_file(format!("is not valid TOML: {} at line {line}, column {column}", error.message()))
    })?;
    Ok(from_toml(toml::Value::Table(table)))
}

fn from_toml(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => Number::from_f64(number).map_or_else(|| non_finite(number), Value::Number),
        toml::Value::Boolean(truth) => truth.into(),
        toml::Value::Datetime(time) => time.to_string().into(),
        toml::Value::Array(items) => items.into_iter().map(from_toml).collect(),
        toml::Value::Table(table) => {
            Value::Object(table.into_iter().map(|(key, value)| (key, from_toml(value))).collect())
        }
    }
}

fn non_finite(number: f64) -> Value {
    let text = if number.is_nan() {
        ".nan"
    } else if number > 0.0 {
        ".inf"
    } else {
        "-.inf"
    };
    text.into()
}

fn parse_json(text: &str) -> Result<Value, Problem> {
    let unique: Unique = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        Problem::of_file(format!("is not valid JSON: {message} at line {}, column {}", error.line(), error.column()))
    })?;
    Ok(unique.0)
}

/// Returns line and column, both from 1, of a byte of a text.
fn position(text: &str, byte: usize) -> (usize, usize) {
    let prefix = text.get(..byte).unwrap_or(text);
    let line_start = prefix.rfind('\n').map_or(0, |newline| newline + 1);
    (prefix.matches('\n').count() + 1, prefix[line_start..].chars().count() + 1)
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// A JSON value in which no object has a key twice; `serde_json::Value` would silently keep the
/// last one.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, truth: bool) -> Result<Value, E> {
        Ok(truth.into())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Unique(value))) = entries.next_entry::<String, Unique>()? {
            if map.contains_key(&key) {
                return Err(Error::custom(format_args!("the key `{key}` stands here twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
