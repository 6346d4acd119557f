//! Notices of skipped rows: at the first one, and when they pass 1 % of the rows.

use run_config::grouped;

use crate::SkippedRows;
use crate::skipped_rows::SkipReason;

/// Skipped rows are told again when more than one in this many rows is skipped.
const FEW: u64 = 100;

/// A row that was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SkippedRow {
    pub file: String,
    pub row_group: u64,
    pub row: u64,
    pub reason: SkipReason,
}

/// The rows read so far, and what was told of those that were skipped.
#[derive(Debug, Default)]
pub(crate) struct SkipNotices {
    pub rows: u64,
    pub skipped: SkippedRows,
    first_told: bool,
    share_told: bool,
    notices: Vec<String>,
}

impl SkipNotices {
    /// Counts rows, some of which were skipped; `first` is the first of these, where it is known.
    pub(crate) fn add(&mut self, rows: u64, skipped: SkippedRows, first: Option<SkippedRow>) {
        self.rows += rows;
        self.skipped += skipped;
        let total = self.skipped.total();
        if total > 0 && !self.first_told {
            self.first_told = true;
            let first = first.map_or_else(String::new, |SkippedRow { file, row_group, row, reason }| {
                format!("; the first is row {row} of row group {row_group} of {file}, {}", reason.describe())
            });
            self.notices.push(format!("rows are skipped, so far {}{first}", self.counts()));
        }
        if self.rows >= FEW && total * FEW > self.rows && !self.share_told {
            self.share_told = true;
            self.notices.push(format!("more than 1 % of the rows are skipped: {}", self.counts()));
        }
    }

    /// Says how many rows were skipped in all; `None` if there are none.
    pub(crate) fn total(&self) -> Option<String> {
        (self.skipped.total() > 0).then(|| format!("rows that are skipped: {}", self.counts()))
    }

    fn counts(&self) -> String {
        format!("{} of {} ({})", grouped(self.skipped.total()), grouped(self.rows), self.skipped)
    }

    /// Takes over what another source of the same rows has counted and told.
    pub(crate) fn carry_over(&mut self, previous: &Self) {
        self.rows += previous.rows;
        self.skipped += previous.skipped;
        (self.first_told, self.share_told) = (previous.first_told, previous.share_told);
    }

    /// Takes the notices since the last call, one sentence each.
    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_rows_are_told_first_and_past_one_percent() {
        let mut notices = SkipNotices::default();
        let empty = |empty| SkippedRows { empty, ..SkippedRows::default() };
        notices.add(1000, empty(0), None);
        assert_eq!(notices.take(), [""; 0]);
        let first = SkippedRow { file: "a.jsonl".to_owned(), row_group: 2, row: 7, reason: SkipReason::Empty };
        notices.add(1, empty(1), Some(first));
        let notice =
            "rows are skipped, so far 1 of 1,001 (1 empty); the first is row 7 of row group 2 of a.jsonl, empty";
        assert_eq!(notices.take(), [notice]);
        notices.add(9, empty(9), None);
        assert_eq!(notices.take(), [""; 0]);
        notices.add(40, empty(1), None);
        assert_eq!(notices.take(), ["more than 1 % of the rows are skipped: 11 of 1,050 (11 empty)"]);
        notices.add(100, empty(100), None);
        assert_eq!(notices.take(), [""; 0]);
    }
}
