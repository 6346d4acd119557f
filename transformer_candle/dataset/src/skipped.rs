//! Rows that never become tokens, counted by reason.

use serde::{Deserialize, Serialize};

/// How many rows were left out, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRows {
    /// The text column is null, or the JSON object lacks it.
    pub null: u64,
    /// The text is empty.
    pub empty: u64,
    /// The bytes are not UTF-8.
    pub not_utf8: u64,
    /// The line is not a JSON object with a text.
    pub malformed: u64,
    /// The text is longer than a document may be.
    pub too_long: u64,
}

impl SkippedRows {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.null + self.empty + self.not_utf8 + self.malformed + self.too_long
    }
}
