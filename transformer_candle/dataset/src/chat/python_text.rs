//! Formats values as Python does, which chat templates are written for: `str`, `repr` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

/// Consumes fuel, as [`State::consume_fuel`] does.
pub(super) type ConsumeFuel<'a> = &'a dyn Fn(u64) -> Result<(), Error>;

/// Bytes that are written for one unit of fuel.
const BYTES_PER_FUEL: usize = 16;
/// Characters by which `tojson` may indent.
const MAX_INDENT: usize = 100;

/// A text that is written as long as there is fuel: a value may hold the same list many times.
struct Text<'a> {
    output: String,
    /// Bytes that fuel was consumed for.
    charged: usize,
    consume_fuel: ConsumeFuel<'a>,
}

impl Text<'_> {
    fn new(consume_fuel: ConsumeFuel<'_>) -> Text<'_> {
        Text { output: String::new(), charged: 0, consume_fuel }
    }

    /// Appends a piece of the text.
    fn push(&mut self, piece: &str) -> Result<(), Error> {
        self.output.push_str(piece);
        let fuel = (self.output.len() - self.charged) / BYTES_PER_FUEL;
        self.charged += fuel * BYTES_PER_FUEL;
        if fuel > 0 { (self.consume_fuel)(fuel as u64) } else { Ok(()) }
    }
}

/// Writes `{{ value }}`: `str(value)`, with nothing for an undefined value.
pub(super) fn format(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => output.write_str(text),
        None => output.write_str(&str(&|fuel| state.consume_fuel(fuel), value)?),
    }
    .map_err(Error::from)
}

/// Formats a value as Python's `str(value)`; an undefined value is empty.
pub(super) fn str(consume_fuel: ConsumeFuel, value: &Value) -> Result<String, Error> {
    let mut text = Text::new(consume_fuel);
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => text.push(value.as_str().unwrap_or_default())?,
        _ => repr(value, &mut text)?,
    }
    Ok(text.output)
}

fn repr(value: &Value, text: &mut Text) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => text.push("None"),
        ValueKind::Bool => text.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => text.push(&number(value)),
        ValueKind::String => text.push(&quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push("[")?;
            for (index, item) in value.try_iter()?.enumerate() {
                text.push(if index > 0 { ", " } else { "" })?;
                repr(&item, text)?;
            }
            text.push("]")
        }
        ValueKind::Map => {
            text.push("{")?;
            for (index, key) in value.try_iter()?.enumerate() {
                text.push(if index > 0 { ", " } else { "" })?;
                repr(&key, text)?;
                text.push(": ")?;
                repr(&item(value, &key), text)?;
            }
            text.push("}")
        }
        _ => text.push(&value.to_string()),
    }
}

fn item(map: &Value, key: &Value) -> Value {
    map.get_item(key).unwrap_or(Value::UNDEFINED)
}

/// Returns `repr` of a string: in single quotes, unless it contains single and no double quotes.
fn quoted(string: &str) -> String {
    let mut text = String::with_capacity(string.len() + 2);
    let mark = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(mark);
    for character in string.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            character if character == mark => text.extend(['\\', mark]),
            character if character.is_control() => {
                let _ = write!(text, "\\x{:02x}", character as u32);
            }
            character => text.push(character),
        }
    }
    text.push(mark);
    text
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// Formats a float as `repr` does: the shortest digits that read back as it, with an exponent from 1e16 and below 1e-4.
fn float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return if number.is_nan() { "nan".to_owned() } else { scientific };
    };
    match exponent.parse::<i32>() {
        Ok(-4..16) => format!("{number:?}"),
        Ok(exponent) => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
        Err(_) => scientific,
    }
}

/// Implements the filter `tojson` as transformers defines it: `json.dumps(value, ensure_ascii=False, ...)`.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
pub(super) fn tojson(consume_fuel: ConsumeFuel, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent: Option<Value> = options.get("indent")?;
    let writer = JsonWriter {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: indent.filter(|indent| !indent.is_none()).map(indentation).transpose()?,
        separators,
    };
    options.assert_all_used()?;
    let mut text = Text::new(consume_fuel);
    writer.write(value, 0, &mut text)?;
    Ok(Value::from(text.output))
}

/// Returns the text that indents by one level: a number of spaces, or the text itself.
#[expect(clippy::needless_pass_by_value, reason = "mapped over an option")]
fn indentation(indent: Value) -> Result<String, Error> {
    let (length, text) = match (indent.as_usize(), indent.as_str()) {
        (Some(spaces), _) => (spaces, None),
        (None, Some(text)) => (text.chars().count(), Some(text)),
        // Python indents by nothing for a number below 0.
        (None, None) if indent.is_integer() && indent < Value::from(0) => (0, None),
        (None, None) => (usize::MAX, None),
    };
    if length > MAX_INDENT {
        let message = format!("`tojson` is to indent by {indent}: give it a number or a text of at most {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(text.map_or_else(|| " ".repeat(length), str::to_owned))
}

struct JsonWriter {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    separators: Option<Vec<String>>,
}

impl JsonWriter {
    fn write(&self, value: &Value, depth: usize, text: &mut Text) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push("null"),
            ValueKind::Bool => text.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push(&number(value)),
            ValueKind::String => text.push(&self.string(value.as_str().unwrap_or_default())),
            ValueKind::Seq | ValueKind::Iterable => {
                self.list(['[', ']'], value.try_iter()?, depth, text, |item, text| self.write(item, depth + 1, text))
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list(['{', '}'], keys.into_iter(), depth, text, |key, text| {
                    text.push(&self.string(&str(text.consume_fuel, key)?))?;
                    text.push(self.separator(1, ": "))?;
                    self.write(&item(value, key), depth + 1, text)
                })
            }
            kind => {
                let message = format!("a value that is {kind} cannot be written as JSON");
                Err(Error::new(ErrorKind::InvalidOperation, message))
            }
        }
    }

    fn list(
        &self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = Value>,
        depth: usize,
        text: &mut Text,
        mut write: impl FnMut(&Value, &mut Text) -> Result<(), Error>,
    ) -> Result<(), Error> {
        text.push(open.encode_utf8(&mut [0; 4]))?;
        let mut is_empty = true;
        for item in items {
            if !std::mem::take(&mut is_empty) {
                text.push(self.separator(0, if self.indent.is_some() { "," } else { ", " }))?;
            }
            self.new_line(depth + 1, text)?;
            write(&item, text)?;
        }
        if !is_empty {
            self.new_line(depth, text)?;
        }
        text.push(close.encode_utf8(&mut [0; 4]))
    }

    fn new_line(&self, depth: usize, text: &mut Text) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        text.push("\n")?;
        text.push(&indent.repeat(depth))
    }

    fn separator<'a>(&'a self, index: usize, usual: &'a str) -> &'a str {
        self.separators.as_ref().and_then(|separators| separators.get(index)).map_or(usual, String::as_str)
    }

    fn string(&self, string: &str) -> String {
        let literal = serde_json::Value::from(string).to_string();
        if !self.ascii {
            return literal;
        }
        let mut text = String::with_capacity(literal.len());
        for character in literal.chars() {
            // Python escapes DEL as well.
            if matches!(character, ' '..='~') {
                text.push(character);
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_print_as_in_python() {
        let value = Value::from(minijinja::value::Serde(
            json!({"a": [true, null, 1.0, 1e16, 1e-5, "it's", "a\"b'\n"], "b": {}}),
        ));
        let str = |value: &Value| super::str(&|_| Ok(()), value).unwrap();
        assert_eq!(str(&value), r#"{'a': [True, None, 1.0, 1e+16, 1e-05, "it's", 'a"b\'\n'], 'b': {}}"#);
        assert_eq!(str(&Value::from("plain 'text'")), "plain 'text'");
        assert_eq!(str(&Value::UNDEFINED), "");
    }

    #[test]
    fn json_is_written_as_in_python() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", |value: Value, options: Kwargs| tojson(&|_| Ok(()), &value, options));
        let context = json!({"v": {"b": ["<\u{e9}\u{1f642}&'\"\n\u{1}\u{7f}", 2.5], "a": []}});
        let render = |filter: &str| {
            environment.render_str(&format!("{{{{ v | {filter} }}}}"), minijinja::value::Serde(&context)).unwrap()
        };
        assert_eq!(render("tojson"), "{\"b\": [\"<\u{e9}\u{1f642}&'\\\"\\n\\u0001\u{7f}\", 2.5], \"a\": []}");
        assert_eq!(
            render("tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':'))"),
            r#"{"a":[],"b":["<\u00e9\ud83d\ude42&'\"\n\u0001\u007f",2.5]}"#
        );
        let indented = "{\n  \"b\": [\n    \"<\u{e9}\u{1f642}&'\\\"\\n\\u0001\u{7f}\",\n    2.5\n  ],\n  \"a\": []\n}";
        assert_eq!(render("tojson(indent=2)"), indented);
    }
}
