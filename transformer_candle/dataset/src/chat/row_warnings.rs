//! Warns of rows that are skipped, and of what a row says that is not used: each kind once.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::conversation::RowProblem;
use super::unused_fields::UnusedField;
use crate::skipped_rows::SkipReason;

/// Kinds of warnings about skipped rows, beside the first one for each reason; and unused fields that are named.
const MAX_WARNINGS: usize = 8;

/// What was warned of.
#[derive(Default)]
pub(super) struct RowWarnings {
    /// The problem of the first row that was skipped, as a sentence.
    first_problem: OnceLock<String>,
    /// Reasons, with the messages without their numbers.
    skipped: Mutex<BTreeSet<(SkipReason, String)>>,
    unused: Mutex<BTreeSet<UnusedField>>,
}

impl RowWarnings {
    /// Warns of the first row with each kind of problem.
    pub(super) fn skipped(&self, RowProblem { reason, message }: RowProblem) -> SkipReason {
        let kind: String = message.chars().filter(|character| !character.is_ascii_digit()).collect();
        let mut names = self.skipped.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first_of_reason = names.iter().all(|(other, _)| *other != reason);
        if (is_first_of_reason || names.len() < MAX_WARNINGS) && names.insert((reason, kind)) {
            tracing::warn!("a row is skipped: {message}");
        }
        let _ = self.first_problem.set(message);
        reason
    }

    /// Warns of each field that is not used, in the first row that has it.
    pub(super) fn unused(&self, fields: Vec<UnusedField>) {
        if fields.is_empty() {
            return;
        }
        let mut names = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        for field in fields {
            if names.len() < MAX_WARNINGS && !names.contains(&field) {
                tracing::warn!("a row has `{}`, {}", field.name, field.consequence);
                names.insert(field);
            }
        }
    }

    /// Returns the problem of the first row that was skipped, in a sentence.
    pub(super) fn first_problem(&self) -> Option<&str> {
        self.first_problem.get().map(String::as_str)
    }

    /// Returns how many kinds of skipped rows and how many fields were warned of.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.skipped.lock().unwrap().len(), self.unused.lock().unwrap().len())
    }
}
