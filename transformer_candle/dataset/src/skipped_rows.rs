//! Skipped rows, counted by reason.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// How many rows were skipped, and why. Which rows are skipped depends on the data alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRows {
    /// The text column is null, or the JSON object lacks the field.
    pub null: u64,
    /// The text is empty.
    pub empty: u64,
    /// The bytes are not UTF-8.
    pub not_utf8: u64,
    /// The line is not a JSON object with a string in the field.
    pub malformed: u64,
    /// The text is longer than 16 MiB.
    pub too_long: u64,
}

impl SkippedRows {
    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        self.null + self.empty + self.not_utf8 + self.malformed + self.too_long
    }

    pub(crate) fn count(&mut self, reason: SkipReason) {
        let counter = match reason {
            SkipReason::Null => &mut self.null,
            SkipReason::Empty => &mut self.empty,
            SkipReason::NotUtf8 => &mut self.not_utf8,
            SkipReason::Malformed => &mut self.malformed,
            SkipReason::TooLong => &mut self.too_long,
        };
        *counter += 1;
    }
}

impl AddAssign for SkippedRows {
    fn add_assign(&mut self, other: Self) {
        self.null += other.null;
        self.empty += other.empty;
        self.not_utf8 += other.not_utf8;
        self.malformed += other.malformed;
        self.too_long += other.too_long;
    }
}

impl fmt::Display for SkippedRows {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.null, "without text"),
            (self.empty, "empty"),
            (self.not_utf8, "not UTF-8"),
            (self.malformed, "not a JSON object with a string"),
            (self.too_long, "over 16 MiB"),
        ];
        let named: Vec<String> =
            counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        formatter.write_str(&named.join(", "))
    }
}

/// Why a row is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SkipReason {
    Null,
    Empty,
    NotUtf8,
    Malformed,
    TooLong,
}
