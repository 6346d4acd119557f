//! Amounts of memory as people write them: `24GB`, `30GiB`, `1.5 GiB`, `1000000`.

use std::fmt;
use std::str::FromStr;

use crate::scalar::scalar;

/// A number of bytes. Written with a decimal (`GB` = 10^9) or binary (`GiB` = 2^30) unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Units by name, largest first, so that the first that divides a size writes it shortest.
const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
];

impl ByteSize {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || "must be an amount of memory such as `24GB` or `30GiB`".to_owned();
        let text = text.trim();
        let digits = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..digits], text[digits..].trim_start());
        let factor = match unit {
            "" | "B" => 1,
            _ => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(invalid)?.1,
        };
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor).filter(|bytes| i64::try_from(*bytes).is_ok()),
            Err(_) => number
                .parse::<f64>()
                .ok()
                .map(|amount| amount * factor as f64)
                .filter(|bytes| *bytes < 9e18)
                .map(|bytes| bytes as u64),
        };
        bytes.filter(|bytes| *bytes > 0).map(Self).ok_or_else(invalid)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 != 0 && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(formatter, "{}{unit}", self.0 / factor),
            None => write!(formatter, "{}B", self.0),
        }
    }
}

scalar!(ByteSize as text, {
    "type": ["string", "integer"], "format": "byte-size", "minimum": 1,
    "pattern": "^\\s*[0-9]+(\\.[0-9]+)?\\s*([KkMmGgTt][Ii]?[Bb]|B)?\\s*$"
});
