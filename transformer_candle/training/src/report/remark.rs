//! Sentences about a run: what holds it back, and why it ended.

use super::scalar::{Record, Scalar, Text};

/// One sentence about what holds the run back and the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdviceReport {
    /// Optimizer steps taken when it was found.
    pub step: u64,
    /// The sentence.
    pub text: String,
}

/// Why training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndReport {
    /// Optimizer steps taken.
    pub step: u64,
    /// The reason in words, such as `all steps are done`.
    pub reason: String,
    /// The program's exit code, where an error ended training.
    pub exit_code: Option<u8>,
}

impl AdviceReport {
    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        Record { texts: vec![Text::new("text", &self.text)], ..Record::new("advice", self.step) }
    }
}

impl EndReport {
    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let scalars = self.exit_code.map(|code| Scalar::plain("exit_code", u64::from(code))).into_iter().collect();
        Record { scalars, texts: vec![Text::new("reason", &self.reason)], ..Record::new(Self::KIND, self.step) }
    }

    /// The kind of its record. A run that is resumed has not ended: rewinding drops these lines.
    pub const KIND: &'static str = "end";
}
