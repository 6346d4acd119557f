//! Spans of time as people write them: `1h`, `30min`, `90s`, `90`, `11h50m`, `1d 12h`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::scalar::scalar;

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
        let invalid = || "must be a span of time such as `1h`, `11h50m`, `30min` or `90s`, at most a year".to_owned();
        let mut rest = text.trim();
        if let Ok(seconds) = rest.parse::<u64>() {
            return Some(Self(seconds)).filter(|span| span.0 <= LONGEST).ok_or_else(invalid);
        }
        // The largest unit comes first, and none twice.
        let (mut total, mut limit) = (0_u64, u64::MAX);
        while !rest.is_empty() {
            let (seconds, factor, next) = leading_part(rest).filter(|part| part.1 < limit).ok_or_else(invalid)?;
            total = total.checked_add(seconds).ok_or_else(invalid)?;
            (limit, rest) = (factor, next);
        }
        Some(Self(total)).filter(|span| limit < u64::MAX && span.0 <= LONGEST).ok_or_else(invalid)
    }
}

/// Returns the seconds of the first number with its unit, the unit's seconds, and the text behind it.
fn leading_part(text: &str) -> Option<(u64, u64, &str)> {
    let digits = text.find(|character: char| !character.is_ascii_digit())?;
    let (number, tail) = (&text[..digits], text[digits..].trim_start());
    let letters = tail.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(tail.len());
    let (unit, rest) = tail.split_at(letters);
    let unit = if unit == "m" { "min" } else { unit };
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
    Some((number.parse::<u64>().ok()?.checked_mul(*factor)?, *factor, rest.trim_start()))
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match UNITS.iter().find(|(_, seconds)| self.0 != 0 && self.0.is_multiple_of(*seconds)) {
            Some((unit, seconds)) => write!(formatter, "{}{unit}", self.0 / seconds),
            None => write!(formatter, "{}s", self.0),
        }
    }
}

scalar!(TimeSpan as text, {
    "type": ["string", "integer"], "format": "time-span", "minimum": 0,
    "pattern": "^\\s*([0-9]+|([0-9]+\\s*(d|h|m|min|s)\\s*)+)\\s*$"
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_and_written_in_the_largest_unit() {
        for (text, seconds, expected) in [("1h", 3600, "1h"), ("90", 90, "90s"), ("120 s", 120, "2min"), ("0", 0, "0s")]
        {
            let span = text.parse().map(|span: TimeSpan| (span.0, span.to_string()));
            assert_eq!(span, Ok((seconds, expected.to_owned())));
        }
        for (text, seconds) in [("11h50m", 42_600), ("1d 12 h", 129_600), (" 1min30s ", 90), ("0h5m", 300)] {
            assert_eq!(text.parse(), Ok(TimeSpan(seconds)), "{text}");
        }
        for text in
            ["", " ", "h", "1h1h", "5m1h", "1h30", "1h -1s", "1.5h", "-1", "1 week", "400d", "99999999999999999999s"]
        {
            assert!(text.parse::<TimeSpan>().is_err_and(|message| message.contains("`1h`")), "{text}");
        }
    }
}
