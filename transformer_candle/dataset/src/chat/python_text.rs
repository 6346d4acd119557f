//! Formats values as Python does, which chat templates are written for: `str`, `repr` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

/// Writes `{{ value }}`: `str(value)`, with nothing for an undefined value.
pub(super) fn format(output: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    output.write_str(&str(value)).map_err(Error::from)
}

/// Formats a value as Python's `str(value)`; an undefined value is empty.
pub(super) fn str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.to_string(),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> String {
    let mut text = String::new();
    match value.kind() {
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), &mut text),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect();
            let _ = write!(text, "[{}]", items.join(", "));
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let items = keys.map(|key| format!("{}: {}", repr(&key), repr(&item(value, &key))));
            let _ = write!(text, "{{{}}}", items.collect::<Vec<_>>().join(", "));
        }
        _ => text.push_str(&value.to_string()),
    }
    text
}

fn item(map: &Value, key: &Value) -> Value {
    map.get_item(key).unwrap_or(Value::UNDEFINED)
}

/// Appends `repr` of a string: in single quotes, unless it contains single and no double quotes.
fn quote(string: &str, text: &mut String) {
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
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent: Option<Value> = options.get("indent")?;
    let writer = JsonWriter {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: indent.filter(|indent| !indent.is_none()).map(|indent| match indent.as_usize() {
            Some(spaces) => " ".repeat(spaces),
            None => str(&indent),
        }),
        separators,
    };
    options.assert_all_used()?;
    let mut text = String::new();
    writer.write(value, 0, &mut text)?;
    Ok(Value::from(text))
}

struct JsonWriter {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    separators: Option<Vec<String>>,
}

impl JsonWriter {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(['[', ']'], &items, depth, text, |item, text| self.write(item, depth + 1, text))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list(['{', '}'], &keys, depth, text, |key, text| {
                    self.string(&str(key), text);
                    text.push_str(self.separator(1, ": "));
                    self.write(&item(value, key), depth + 1, text)
                })?;
            }
            kind => {
                let message = format!("a value that is {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        text: &mut String,
        mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        text.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                text.push_str(self.separator(0, if self.indent.is_some() { "," } else { ", " }));
            }
            self.new_line(depth + 1, text);
            write(item, text)?;
        }
        if !items.is_empty() {
            self.new_line(depth, text);
        }
        text.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    }

    fn separator<'a>(&'a self, index: usize, usual: &'a str) -> &'a str {
        self.separators.as_ref().and_then(|separators| separators.get(index)).map_or(usual, String::as_str)
    }

    fn string(&self, string: &str, text: &mut String) {
        text.push('"');
        for character in string.chars() {
            match character {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                character if (character as u32) < 0x20 || (self.ascii && !character.is_ascii()) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                character => text.push(character),
            }
        }
        text.push('"');
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
        assert_eq!(str(&value), r#"{'a': [True, None, 1.0, 1e+16, 1e-05, "it's", 'a"b\'\n'], 'b': {}}"#);
        assert_eq!(str(&Value::from("plain 'text'")), "plain 'text'");
        assert_eq!(str(&Value::UNDEFINED), "");
    }

    #[test]
    fn json_is_written_as_in_python() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let context = json!({"v": {"b": ["<\u{e9}\u{1f642}&'\"\n\u{1}", 2.5], "a": []}});
        let render = |filter: &str| {
            environment.render_str(&format!("{{{{ v | {filter} }}}}"), minijinja::value::Serde(&context)).unwrap()
        };
        assert_eq!(render("tojson"), "{\"b\": [\"<\u{e9}\u{1f642}&'\\\"\\n\\u0001\", 2.5], \"a\": []}");
        assert_eq!(
            render("tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':'))"),
            r#"{"a":[],"b":["<\u00e9\ud83d\ude42&'\"\n\u0001",2.5]}"#
        );
        let indented = "{\n  \"b\": [\n    \"<\u{e9}\u{1f642}&'\\\"\\n\\u0001\",\n    2.5\n  ],\n  \"a\": []\n}";
        assert_eq!(render("tojson(indent=2)"), indented);
    }
}
