//! The audit of one component: its windows and epochs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Problems;
use crate::corrupted_rows::{CorruptedRows, FoundCorruption, first_corrupted_row, is_whole_shard_corrupted};
use crate::formats::{Row, ShardReader};
use crate::held_out_split::HeldOutSplit;
use crate::ledger::{BeginPosition, FilesRecord, RowRange, SequenceRange, WindowRecord};
use crate::skipped_rows::is_zero;
use crate::{DataError, DataSource};

/// The audit of one component.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditedComponent {
    /// The data set's name, or the patterns.
    pub name: String,
    /// Sequences of the component in the ledger's steps.
    pub sequences: u64,
    /// Sequences of the component that stages have left out.
    #[serde(skip_serializing_if = "is_zero")]
    pub left_out: u64,
    /// Warnings of files whose rows were skipped because they could not be decoded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub corrupted: Vec<String>,
    /// Files that have changed while the run was stopped, which was accepted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<String>,
    /// The epochs that were started.
    pub epochs: Vec<AuditedEpoch>,
}

/// The audit of one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditedEpoch {
    /// Number of the epoch, from 0.
    pub epoch: u64,
    /// Documents in the windows used.
    pub documents: u64,
    /// Rows read for these windows.
    pub rows: u64,
    /// Whether the epoch is over, so that every row of the training set had to be there.
    pub finished: bool,
    /// Whether the ledger has the epoch from its first window on. In an epoch that started before the ledger, only rows
    /// that were used twice are found.
    pub whole: bool,
}

/// Row ranges read, by (shard, row group): first row and the row after the last.
type Coverage = BTreeMap<(u64, u64), Vec<(u64, u64)>>;

/// Checks the windows and epochs of one component.
pub(super) struct ComponentAuditor<'a> {
    source: &'a DataSource,
    split: &'a HeldOutSplit,
    pub(super) audited: AuditedComponent,
    expected: ExpectedPosition,
    corrupted: Vec<CorruptedRows>,
    /// The files of the steps that follow, if they are recorded.
    files: Option<FilesRecord>,
    /// Shards whose files have changed, with the epoch in progress then: it need not have all rows of the changed file.
    changed: Vec<(u64, u64)>,
    epoch: Option<(AuditedEpoch, Coverage)>,
}

/// The position at which the sequences of the next step must start.
#[derive(Default)]
struct ExpectedPosition {
    /// (epoch, window, sequences) of the windows that are not used up.
    windows: Vec<(u64, u64, u64)>,
    /// (epoch, window) of the last window that was used up.
    last_finished: Option<(u64, u64)>,
    sequence: u64,
}

impl<'a> ComponentAuditor<'a> {
    pub(super) fn new(source: &'a DataSource, split: &'a HeldOutSplit) -> Self {
        Self {
            source,
            split,
            audited: AuditedComponent { name: source.name().to_owned(), ..AuditedComponent::default() },
            expected: ExpectedPosition::default(),
            corrupted: Vec::new(),
            files: None,
            changed: Vec::new(),
            epoch: None,
        }
    }

    /// Takes note of the files, and of those that have changed.
    pub(super) fn files(&mut self, record: FilesRecord) {
        if let Some(former) = self.files.take() {
            let epoch = self.epoch.as_ref().map_or(0, |(audited, _)| audited.epoch);
            for file in former.changes(&record) {
                let changed_shards = file.shards.iter().filter(|_| !file.is_appended);
                self.changed.extend(changed_shards.map(|&shard| (shard, epoch)));
                self.audited.changed.push(file.to_string());
            }
        }
        self.files = Some(record);
    }

    /// Adds rows that were skipped from here on.
    pub(super) fn corrupted(&mut self, corruption: &FoundCorruption) {
        self.corrupted.push(corruption.rows);
        self.audited.corrupted.push(corruption.warning());
    }

    /// Starts at the position where the ledger does, in the middle of a run.
    pub(super) fn begin(&mut self, begin: &BeginPosition) {
        self.expected = ExpectedPosition { sequence: begin.sequence, ..ExpectedPosition::default() };
        let whole = (begin.window, begin.sequence) == (0, 0);
        self.epoch = Some((AuditedEpoch { epoch: begin.epoch, whole, ..AuditedEpoch::default() }, Coverage::new()));
    }

    pub(super) fn window(&mut self, window: &WindowRecord, problems: &mut Problems) -> Result<(), DataError> {
        let (epoch, number) = (window.start.epoch, window.start.window);
        if self.epoch.as_ref().is_some_and(|(current, _)| current.epoch != epoch) {
            self.finish_epoch(true, problems)?;
        }
        let name = &self.audited.name;
        let windows = &mut self.expected.windows;
        if windows.last().is_some_and(|&(last_epoch, last, _)| (last_epoch, last) >= (epoch, number)) {
            problems.note(|| format!("window {number} of epoch {} of {name} comes after a later one", epoch + 1));
        }
        windows.push((epoch, number, window.sequences));
        let new_epoch = || (AuditedEpoch { epoch, whole: true, ..AuditedEpoch::default() }, Coverage::new());
        let (audited, coverage) = self.epoch.get_or_insert_with(new_epoch);
        audited.documents += window.documents;
        for range in &window.row_ranges {
            audited.rows += range.rows;
            let rows = (range.first_row, range.first_row + range.rows);
            coverage.entry((range.shard, range.row_group)).or_default().push(rows);
        }
        let rows: u64 = window.row_ranges.iter().map(|range| range.rows).sum();
        let row_count = window.documents + window.skipped.total();
        if rows != row_count {
            problems.note(|| {
                format!("window {number} of epoch {} of {name} read {rows} rows, but it counts {row_count}", epoch + 1)
            });
        }
        Ok(())
    }

    /// Advances past the sequences that a step took; false if they do not start where the previous step ended.
    pub(super) fn take(&mut self, range: &SequenceRange) -> bool {
        self.audited.sequences += range.sequences;
        self.expected.take(range)
    }

    /// Advances past the sequences that a stage leaves out; false if they do not start where the previous step ended, or
    /// do not end with the window.
    pub(super) fn leave_out(&mut self, range: &SequenceRange) -> bool {
        self.audited.left_out += range.sequences;
        self.expected.take(range) && !self.is_in_window()
    }

    /// Whether the next sequence is inside a window.
    pub(super) fn is_in_window(&self) -> bool {
        self.expected.is_in_window()
    }

    /// Checks the rows of the epoch in progress; if it is `finished`, every training row must be there.
    pub(super) fn finish_epoch(&mut self, finished: bool, problems: &mut Problems) -> Result<(), DataError> {
        let Some((mut audited, mut coverage)) = self.epoch.take() else {
            return Ok(());
        };
        audited.finished = finished;
        let (epoch, epoch_number) = (audited.epoch, audited.epoch + 1);
        for ((shard, row_group), ranges) in &mut coverage {
            ranges.sort_unstable();
            if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
                let (name, row) = (&self.source.shards()[*shard as usize].name, pair[1].0);
                problems.note(|| {
                    format!("row {row} of row group {row_group} of {name} was used twice in epoch {epoch_number}")
                });
            }
        }
        if finished && audited.whole {
            self.check_complete(epoch, &coverage, problems)?;
        }
        self.audited.epochs.push(audited);
        Ok(())
    }

    fn check_complete(&self, epoch: u64, coverage: &Coverage, problems: &mut Problems) -> Result<(), DataError> {
        // Those found in a later epoch were read in this one.
        let skipped_rows: Vec<CorruptedRows> =
            self.corrupted.iter().filter(|rows| rows.epoch <= epoch).copied().collect();
        for index in 0..self.split.training_shards(self.source.added_shards(epoch)) {
            let has_changed = self.changed.iter().any(|&(shard, last)| shard == index as u64 && epoch <= last);
            if has_changed || self.source.is_removed(index) || is_whole_shard_corrupted(&skipped_rows, index) {
                continue;
            }
            let name = &self.source.shards()[index].name;
            let mut reader = self.source.open(index)?;
            let mut row_group = 0;
            while row_group < self.split.training_row_groups(index, reader.row_groups().unwrap_or(u64::MAX)) {
                let training_rows = self.split.training_rows(index, name, row_group);
                let rows = match first_corrupted_row(&skipped_rows, index, row_group) {
                    None => self.count_training_rows(reader.as_mut(), row_group, training_rows)?,
                    // Past the corrupted rows of a shard that is read in its own order there is nothing.
                    Some(0) if reader.row_groups().is_none() => None,
                    readable => readable,
                };
                let Some(rows) = rows else {
                    break;
                };
                let rows = rows.min(training_rows);
                let read = coverage.get(&(index as u64, row_group)).map_or(&[][..], Vec::as_slice);
                for gap in gaps(read, RowRange { shard: index as u64, row_group, first_row: 0, rows }) {
                    if let Some(row) = self.first_document(&gap)? {
                        problems.note(|| {
                            format!("row {row} of row group {row_group} of {name} was not used in epoch {}", epoch + 1)
                        });
                    }
                }
                row_group += 1;
            }
        }
        Ok(())
    }

    /// Returns the number of rows of a row group; `None` if there is no such row group. Rows that cannot be decoded are not
    /// counted if they follow the training rows.
    fn count_training_rows(
        &self,
        reader: &mut dyn ShardReader,
        row_group: u64,
        training_rows: u64,
    ) -> Result<Option<u64>, DataError> {
        match reader.row_count(row_group) {
            Err(error) if self.source.skips(&error) => {
                let rows = self.source.count_rows(reader, row_group)?.unwrap_or(0);
                if rows >= training_rows { Ok(Some(rows)) } else { Err(error) }
            }
            count => count,
        }
    }

    /// Returns the first of these rows that holds a document. Skipped rows are not in the ledger if a window would have
    /// nothing else.
    fn first_document(&self, rows: &RowRange) -> Result<Option<u64>, DataError> {
        let mut reader = self.source.open(rows.shard as usize)?;
        reader.seek(rows.row_group, rows.first_row)?;
        for row in rows.first_row..rows.first_row + rows.rows {
            if matches!(reader.next_row()?, Some(Row::Document(_))) {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }
}

impl ExpectedPosition {
    /// Advances past the sequences that a step took; false if they do not start here or are more than there are.
    fn take(&mut self, range: &SequenceRange) -> bool {
        self.drop_exhausted_windows();
        let Some(&(epoch, window, _)) = self.windows.first() else {
            return false;
        };
        let (expected, actual) = ((epoch, window), (range.epoch, range.window));
        // At the end of a window the cursor names the window after it, which may turn out to have no sequence.
        let is_between = self.last_finished.is_none_or(|last| last < actual) && actual <= expected;
        let starts_here =
            range.first_sequence == self.sequence && if self.sequence == 0 { is_between } else { actual == expected };
        self.sequence += range.sequences;
        while self.windows.len() > 1 && self.sequence > self.windows[0].2 {
            self.sequence -= self.windows[0].2;
            self.finish_window();
        }
        starts_here && self.sequence <= self.windows[0].2
    }

    fn is_in_window(&self) -> bool {
        let end = self.windows.first().map(|&(.., sequences)| sequences);
        self.sequence != 0 && end != Some(self.sequence)
    }

    fn drop_exhausted_windows(&mut self) {
        while self.windows.first().is_some_and(|&(.., sequences)| self.sequence == sequences) {
            self.sequence = 0;
            self.finish_window();
        }
    }

    fn finish_window(&mut self) {
        let (epoch, window, _) = self.windows.remove(0);
        self.last_finished = Some((epoch, window));
    }
}

/// Returns the parts of `rows` that none of the sorted ranges covers.
fn gaps(covered: &[(u64, u64)], rows: RowRange) -> Vec<RowRange> {
    let end = rows.first_row + rows.rows;
    let (mut gaps, mut next) = (Vec::new(), rows.first_row);
    for &(first, last) in covered.iter().chain(std::iter::once(&(end, end))) {
        let first = first.min(end);
        if first > next {
            gaps.push(RowRange { first_row: next, rows: first - next, ..rows });
        }
        next = next.max(last);
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_the_rows_that_no_range_covers() {
        let rows = RowRange { shard: 1, row_group: 2, first_row: 0, rows: 10 };
        let gaps = |covered: &[(u64, u64)]| {
            gaps(covered, rows).iter().map(|gap| (gap.first_row, gap.rows)).collect::<Vec<_>>()
        };
        assert_eq!(gaps(&[]), [(0, 10)]);
        assert_eq!(gaps(&[(0, 10)]), []);
        assert_eq!(gaps(&[(2, 4), (4, 6), (8, 10)]), [(0, 2), (6, 2)]);
        assert_eq!(gaps(&[(0, 3), (12, 15)]), [(3, 7)]);
    }
}
