//! Spans of time as people write them: `1h`, `30min`, `90s`, `90`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An integer number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeSpan(pub u64);

/// Units by name, largest first, so that the first that divides a span writes it shortest.
const UNITS: [(&str, u64); 4] = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)];

/// The longest span that a config may name: a year.
const LONGEST: u64 = 366 * 86_400;

impl TimeSpan {
    /// The span as a [`Duration`].
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.0)
    }
}

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || "must be a span of time such as `1h`, `30min` or `90s`, at most a year".to_owned();
        let text = text.trim();
        let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = (&text[..digits], text[digits..].trim_start());
        let factor = match unit {
            "" => 1,
            _ => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?.1,
        };
        let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
        seconds.filter(|seconds| *seconds <= LONGEST).map(Self).ok_or_else(invalid)
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match UNITS.iter().find(|(_, seconds)| self.0 != 0 && self.0.is_multiple_of(*seconds)) {
            Some((unit, seconds)) => write!(formatter, "{}{unit}", self.0 / seconds),
            None => write!(formatter, "{}s", self.0),
        }
    }
}

impl Serialize for TimeSpan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::scalar::from_text(deserializer)
    }
}

impl JsonSchema for TimeSpan {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TimeSpan".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["string", "integer"], "format": "time-span", "minimum": 0,
            "pattern": "^\\s*[0-9]+\\s*(d|h|min|s)?\\s*$"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_and_written_in_the_largest_unit() {
        for (text, seconds, written) in [("1h", 3600, "1h"), ("90", 90, "90s"), ("120 s", 120, "2min"), ("0", 0, "0s")]
        {
            let span = text.parse().map(|span: TimeSpan| (span.0, span.to_string()));
            assert_eq!(span, Ok((seconds, written.to_owned())));
        }
        for text in ["", "h", "1.5h", "-1", "1 week", "400d", "99999999999999999999s"] {
            assert!(text.parse::<TimeSpan>().is_err_and(|message| message.contains("`1h`")), "{text}");
        }
    }
}
