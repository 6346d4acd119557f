//! A JSON object becomes a row: a document in its text field, or a conversation.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize as _;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::{BYTE_ORDER_MARK, Columns, Field, ReadingRules, Row};
use crate::skipped_rows::SkipReason;

/// The numbers without a JSON form that Python's json, and so pandas, writes. The longest come first.
const NON_FINITE_NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
/// Objects within objects whose fields are listed as `outer.inner`.
const MAX_LISTED_DEPTH: usize = 3;

/// The JSON of a row, without its line end or comma, up to a maximum length.
pub(super) struct JsonText {
    pub bytes: Vec<u8>,
    /// Whether it is longer; then its bytes are left out.
    pub too_long: bool,
}

impl JsonText {
    /// Returns the text without the byte order mark that the first line of a file may have, as may others of
    /// concatenated files; `None` if it is not UTF-8.
    fn text(&self) -> Option<&str> {
        str::from_utf8(self.bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&self.bytes)).ok()
    }

    /// Returns the row; `None` if the text is blank.
    pub(super) fn row(self, rules: &ReadingRules) -> Option<Row> {
        if self.too_long {
            return Some(Row::Skipped(SkipReason::TooLong));
        }
        let Some(json) = self.text() else {
            return Some(Row::Skipped(SkipReason::NotUtf8));
        };
        if json.trim().is_empty() {
            return None;
        }
        let text = match &rules.columns {
            // In the text field, a number is as malformed as NaN.
            Columns::Text(name) => parse(json, rules.version, "0", |json| string_field(json, name)),
            Columns::Conversation => {
                parse(json, rules.version, "null", |json| is_object(json).map(|()| Some(json.to_owned())))
            }
        };
        Some(match text {
            Ok(Some(text)) => Row::from_bytes(text.into_bytes(), true),
            Ok(None) => Row::Skipped(SkipReason::Null),
            Err(_) => Row::Skipped(SkipReason::Malformed),
        })
    }

    /// Adds the fields of the object to a list, those of objects within it as `outer.inner`.
    pub(super) fn list_fields(&self, fields: &mut Vec<Field>) {
        let object = |json: &str| serde_json::from_str::<Map<String, Value>>(json);
        if let Some(Ok(object)) = self.text().map(|json| parse(json, 2, "0", object)) {
            list_fields(&object, "", MAX_LISTED_DEPTH, fields);
        }
    }
}

fn list_fields(object: &Map<String, Value>, prefix: &str, depth: usize, fields: &mut Vec<Field>) {
    for (name, value) in object {
        let name = format!("{prefix}{name}");
        let non_string_type = match value {
            Value::String(_) => None,
            Value::Null => Some("null"),
            Value::Bool(_) => Some("booleans"),
            Value::Number(_) => Some("numbers"),
            Value::Array(_) => Some("lists"),
            Value::Object(_) => Some("objects"),
        };
        match fields.iter_mut().find(|field| field.name == name) {
            Some(field) => field.non_string_type = field.non_string_type.and(non_string_type),
            None => fields.push(Field { name: name.clone(), non_string_type }),
        }
        if let Value::Object(inner) = value
            && depth > 1
        {
            list_fields(inner, &format!("{name}."), depth - 1, fields);
        }
    }
}

/// Parses JSON as Python's json does since reading version 2: a number that is not finite becomes `substitute`.
fn parse<T>(
    json: &str,
    version: u32,
    substitute: &str,
    parse: impl Fn(&str) -> serde_json::Result<T>,
) -> serde_json::Result<T> {
    parse(json).or_else(|error| {
        let replacement = if version >= 2 { replace_non_finite(json, substitute) } else { None };
        replacement.map_or(Err(error), |json| parse(&json))
    })
}

/// Replaces `NaN`, `Infinity` and `-Infinity` outside strings by `substitute`; `None` if there are none. Spaces around
/// it keep the tokens beside it apart, so that what is no JSON for another reason stays so.
fn replace_non_finite(json: &str, substitute: &str) -> Option<String> {
    let mut output = String::new();
    let (mut copied_bytes, mut position, mut in_string) = (0, 0, false);
    let bytes = json.as_bytes();
    while position < bytes.len() {
        match bytes[position] {
            b'\\' if in_string => position += 1,
            b'"' => in_string = !in_string,
            b'-' | b'I' | b'N' if !in_string => {
                let number = NON_FINITE_NUMBERS.iter().find(|number| bytes[position..].starts_with(number.as_bytes()));
                if let Some(number) = number {
                    output.extend([&json[copied_bytes..position], " ", substitute, " "]);
                    position += number.len();
                    copied_bytes = position;
                    continue;
                }
            }
            _ => {}
        }
        position += 1;
    }
    (copied_bytes > 0).then(|| output + &json[copied_bytes..])
}

/// Fails unless the JSON is an object.
fn is_object(json: &str) -> serde_json::Result<()> {
    serde_json::from_str::<BTreeMap<String, Value>>(json).map(drop)
}

/// Returns the string in a field of a JSON object, `outer.inner` being a field of an object in it; `None` if it is null
/// or missing.
fn string_field(json: &str, name: &str) -> serde_json::Result<Option<String>> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let text = StringField { name }.deserialize(&mut deserializer)?;
    deserializer.end().map(|()| text)
}

/// Deserializes one field of a JSON object, a string or null, and ignores the others.
struct StringField<'a> {
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for StringField<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringField<'_> {
    type Value = Option<String>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object with a string `{}`", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut text, mut inner_text) = (None, None);
        let mut has_text = false;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            let inner = self.name.strip_prefix(key.as_ref()).map(|rest| (rest, rest.strip_prefix('.')));
            match inner {
                Some(("", _)) if std::mem::replace(&mut has_text, true) => {
                    return Err(A::Error::custom("the text field appears twice"));
                }
                Some(("", _)) => text = map.next_value()?,
                Some((_, Some(name))) => inner_text = map.next_value_seed(InnerField { name })?.or(inner_text),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(if has_text { text } else { inner_text })
    }
}

/// Deserializes a field of an object within an object; `None` if there is no such object.
struct InnerField<'a> {
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for InnerField<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let inner = self.name.split('.').try_fold(&value, |value, name| value.get(name));
        match value.get(self.name).or(inner) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(D::Error::custom("the text field holds no string")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(json: &str, column: &str, version: u32) -> Row {
        let text = JsonText { bytes: json.as_bytes().to_vec(), too_long: false };
        text.row(&ReadingRules { version, ..ReadingRules::of_column(column) }).unwrap()
    }

    fn document(text: &str) -> Row {
        Row::from_bytes(text.as_bytes().to_vec(), true)
    }

    #[test]
    fn numbers_that_are_not_finite_are_ignored() {
        let json = r#"{"a": NaN, "text": "NaN \" -Infinity", "b": [Infinity, {"c": -Infinity}]}"#;
        assert_eq!(row(json, "text", 2), document("NaN \" -Infinity"));
        assert_eq!(row(json, "text", 1), Row::Skipped(SkipReason::Malformed));
        let conversation = ReadingRules { columns: Columns::Conversation, version: 2 };
        let text = JsonText { bytes: br#"{"tools":NaN,"messages":[]}"#.to_vec(), too_long: false };
        assert_eq!(text.row(&conversation), Some(document(r#"{"tools": null ,"messages":[]}"#)));
    }

    #[test]
    fn other_words_stay_malformed() {
        for value in ["NaN", "1NaN", "NaN1", "- Infinity", "--Infinity", "nan", "Inf", "+Infinity", "NaNNaN", "-NaN"] {
            let alone = format!("{{\"text\": {value}}}");
            assert_eq!(row(&alone, "text", 2), Row::Skipped(SkipReason::Malformed), "{alone}");
            let row_text = format!("{{\"text\": \"x\", \"a\": {value}}}");
            let expected = if value == "NaN" { document("x") } else { Row::Skipped(SkipReason::Malformed) };
            assert_eq!(row(&row_text, "text", 2), expected, "{row_text}");
        }
    }

    #[test]
    fn dotted_names_find_fields_of_inner_objects() {
        let text_of = |json: &str| row(json, "a.b.c", 2);
        assert_eq!(text_of(r#"{"a": {"b": {"c": "x"}}, "id": 1}"#), document("x"));
        assert_eq!(text_of(r#"{"a": {"b": {"c": "x"}}, "a.b.c": "exact"}"#), document("exact"));
        assert_eq!(text_of(r#"{"a": {"b.c": "x"}}"#), document("x"));
        for nothing in [r#"{"a": null}"#, r#"{"a": {"b": 3}}"#, r#"{"a": {"b": {"c": null}}}"#, r#"{"ab": "x"}"#] {
            assert_eq!(text_of(nothing), Row::Skipped(SkipReason::Null), "{nothing}");
        }
        assert_eq!(text_of(r#"{"a": {"b": {"c": 1}}}"#), Row::Skipped(SkipReason::Malformed));
    }
}
