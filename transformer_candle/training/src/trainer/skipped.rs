//! What a trainer tells of skipped rows and files, and of what it does not use of others.

use std::collections::HashSet;

use dataset::{ComponentPosition, Cursor, SkippedRows};

use super::Trainer;
use crate::report::DataReport;

impl Trainer {
    /// Warns of rows and files that the last call to the stream has skipped, and records their counts.
    pub(super) fn tell_skipped(&mut self, step: u64) {
        let stream = &mut self.data.stream;
        let corrupted = stream.found_corruption().map(|(_, corruption)| corruption.warning());
        self.notices.extend(corrupted.collect::<Vec<_>>());
        self.notices.extend(stream.take_notices());
        let report = DataReport {
            step,
            rows: stream.rows().iter().sum(),
            skipped: stream.skipped().into_iter().fold(SkippedRows::default(), |sum, of| sum + of),
            bad_files: bad_files(&stream.cursor()),
        };
        if report.differs_in_skipped(&self.data_report) {
            self.metrics.record(&report.record());
            self.data_report = report;
        }
    }

    /// Returns the corrupted rows that are skipped, as text; empty if there are none.
    pub(super) fn corrupted_rows(&self) -> String {
        let components = self.data.stream.cursor().components;
        let corrupted: Vec<_> = components.into_iter().map(|component| component.corrupted).collect();
        if corrupted.iter().all(Vec::is_empty) {
            return String::new();
        }
        serde_json::to_string(&corrupted).expect("corrupted rows are plain numbers")
    }

    /// Returns the number of rows of each component that were skipped since the trainer was created, by reason.
    pub fn skipped_rows(&self) -> Vec<SkippedRows> {
        self.data.stream.skipped()
    }

    /// Returns the number of conversations of each component that were truncated since the trainer was created.
    pub fn truncated_conversations(&self) -> Vec<u64> {
        self.data.stream.truncated()
    }

    /// Returns the number of documents and conversations of each component, since the trainer was created, that spell
    /// special tokens.
    pub fn spelling_special_tokens(&self) -> Vec<u64> {
        self.data.stream.spelling_special_tokens()
    }

    /// Returns the number of conversations of each component, since the trainer was created, whose rows say what neither
    /// the chat template nor the loss uses.
    pub fn conversations_with_unused_fields(&self) -> Vec<u64> {
        self.data.stream.with_unused_fields()
    }

    /// Returns the number of files of which rows are skipped because they cannot be decoded.
    pub fn bad_files(&self) -> u64 {
        bad_files(&self.position.cursor)
    }
}

/// Returns the number of files with corrupted rows.
fn bad_files(cursor: &Cursor) -> u64 {
    let of_component = |component: &ComponentPosition| {
        component.corrupted.iter().map(|rows| rows.shard).collect::<HashSet<u64>>().len() as u64
    };
    cursor.components.iter().map(of_component).sum()
}
