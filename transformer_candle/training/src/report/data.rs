//! Rows that were read and skipped.

use dataset::SkippedRows;

use super::scalar::{Record, Scalar, Text};

/// The rows that a session of training has read, and those of them that were skipped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DataReport {
    /// Optimizer steps taken.
    pub step: u64,
    /// Rows of the windows used since the run was started or resumed, skipped ones included.
    pub rows: u64,
    /// Skipped rows among these, by reason.
    pub skipped: SkippedRows,
    /// Files of which rows are skipped because they cannot be decoded, since the run began.
    pub bad_files: u64,
}

impl DataReport {
    /// Whether more is skipped than in another report.
    pub(crate) fn differs_in_skipped(&self, other: &Self) -> bool {
        (self.skipped, self.bad_files) != (other.skipped, other.bad_files)
    }

    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let mut scalars = vec![
            Scalar::plain("rows", self.rows),
            Scalar::plain("skipped_rows", self.skipped.total()),
            Scalar::plain("bad_files", self.bad_files),
        ];
        let reasons = self.skipped.counts().into_iter().filter(|(_, count)| *count > 0);
        scalars.extend(reasons.map(|(reason, count)| Scalar::plain(reason, count)));
        Record {
            scalars,
            texts: vec![Text::new("skipped", self.skipped.to_string())],
            ..Record::new("data", self.step)
        }
    }
}
