//! Rows in listing order: all of them, or those that are held out.

use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cancel::{CancelToken, receive};
use crate::formats::{Row, ShardReader};
use crate::held_out_split::HeldOutSplit;
use crate::skip_notices::SkippedRow;
use crate::{CorruptedRows, DataError, DataSource, FoundCorruption, SkippedRows};

/// Which rows are read.
enum RowFilter {
    All,
    HeldOut(Arc<HeldOutSplit>),
}

/// Reads the rows of a source in listing order, with one shard open at a time.
pub(crate) struct SequentialReader {
    source: DataSource,
    filter: RowFilter,
    shards: Range<usize>,
    current: Option<CurrentShard>,
    findings: Findings,
}

/// What a reader finds besides rows: corrupted rows, and the first row that it skips. Shared with its owner, as it may
/// read on another thread.
#[derive(Clone, Default)]
pub(crate) struct Findings(Arc<Mutex<FindingParts>>);

#[derive(Default)]
struct FindingParts {
    corrupted: Vec<CorruptedRows>,
    warnings: Vec<String>,
    first_skipped: Option<SkippedRow>,
}

impl Findings {
    fn parts(&self) -> MutexGuard<'_, FindingParts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the warnings of corrupted rows since the last call.
    pub(crate) fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.parts().warnings)
    }

    /// Takes the first row that was skipped.
    pub(crate) fn take_first_skipped(&self) -> Option<SkippedRow> {
        self.parts().first_skipped.take()
    }
}

struct CurrentShard {
    reader: Box<dyn ShardReader>,
    index: usize,
    row_group: u64,
    /// The next row of the row group.
    row: u64,
    /// Whether the reader has been moved into the row group.
    positioned: bool,
    skipped: SkippedRows,
    has_document: bool,
}

impl SequentialReader {
    /// Reads every row.
    pub(crate) fn all(source: &DataSource) -> Self {
        Self::new(source, RowFilter::All, 0..source.shards().len())
    }

    /// Reads the rows that `split` holds out.
    pub(crate) fn held_out(source: &DataSource, split: Arc<HeldOutSplit>) -> Self {
        let shards = split.held_out_shards();
        Self::new(source, RowFilter::HeldOut(split), shards)
    }

    fn new(source: &DataSource, filter: RowFilter, shards: Range<usize>) -> Self {
        Self { source: source.clone(), filter, shards, current: None, findings: Findings::default() }
    }

    /// Starts again at the first row.
    pub(crate) fn restart(&mut self) {
        (self.shards, self.current) = (0..self.source.shards().len(), None);
    }

    /// What the reader finds besides rows.
    pub(crate) fn findings(&self) -> Findings {
        self.findings.clone()
    }

    /// Reads the next rows, at most `max_rows`; returns an empty list after the last.
    fn next_rows(&mut self, max_rows: usize) -> Result<Vec<Row>, DataError> {
        std::iter::from_fn(|| self.next_row().transpose()).take(max_rows).collect()
    }

    /// Reads the next row; `None` after the last.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            self.source.cancel().check()?;
            let mut current = match self.current.take() {
                Some(current) => current,
                None => match self.shards.next() {
                    Some(index) => match self.source.open(index) {
                        Err(error) if self.source.skips(&error) => {
                            self.skip_corrupted((index, 0, 0), true, &error)?;
                            continue;
                        }
                        reader => CurrentShard::new(reader?, index),
                    },
                    None => return Ok(None),
                },
            };
            let row = match current.next_row(&self.filter, &self.source.shards()[current.index].name) {
                Err(error) if self.source.skips(&error) => {
                    let ends = current.reader.row_groups().is_none();
                    self.skip_corrupted((current.index, current.row_group, current.row), ends, &error)?;
                    if !ends {
                        (current.row_group, current.row, current.positioned) = (current.row_group + 1, 0, false);
                        self.current = Some(current);
                    }
                    continue;
                }
                row => row?,
            };
            match &row {
                Some(Row::Document(_)) => current.has_document = true,
                Some(Row::Skipped(reason)) => current.skipped.count(*reason),
                None => self.tell_unusable(&current),
            }
            if let Some(Row::Skipped(reason)) = row {
                let (row_group, row) = (current.row_group, current.row - 1);
                let file = || self.source.shards()[current.index].name.clone();
                let skipped = || SkippedRow { file: file(), row_group, row, reason };
                self.findings.parts().first_skipped.get_or_insert_with(skipped);
            }
            if row.is_some() {
                self.current = Some(current);
                return Ok(row);
            }
        }
    }

    /// Adds a warning if a whole shard was read and none of its rows can be used.
    fn tell_unusable(&self, shard: &CurrentShard) {
        if matches!(self.filter, RowFilter::All) && !shard.has_document {
            let notice = self.source.unusable_notice(shard.index, shard.skipped);
            self.findings.parts().warnings.extend(notice);
        }
    }

    /// Records rows that cannot be decoded; fails where there are too many.
    fn skip_corrupted(
        &self,
        (shard, row_group, first_row): (usize, u64, u64),
        rest_of_shard: bool,
        error: &DataError,
    ) -> Result<(), DataError> {
        let rows = CorruptedRows { shard: shard as u64, row_group, first_row, rest_of_shard, epoch: 0, window: 0 };
        let corruption = FoundCorruption::new(rows, &self.source.shards()[shard].name, error);
        let mut parts = self.findings.parts();
        // A second pass finds the same rows.
        if !parts.corrupted.contains(&rows) {
            parts.corrupted.push(rows);
            parts.warnings.push(corruption.warning());
        }
        self.source.check_corrupted(&parts.corrupted, Some(&corruption))
    }
}

/// A [`SequentialReader`] on a thread of its own, which reads ahead: its caller can stop waiting for a slow read.
pub(crate) struct PrefetchThread {
    rows: Receiver<Result<Vec<Row>, DataError>>,
    cancel: CancelToken,
}

impl PrefetchThread {
    /// Starts the thread, which reads `max_rows` rows at a time.
    pub(crate) fn start(mut reader: SequentialReader, max_rows: usize) -> Result<Self, DataError> {
        let (sender, rows) = sync_channel(0);
        let cancel = reader.source.cancel().clone();
        let read = move || {
            let mut failed = false;
            // Ends when the receiver is dropped.
            while !failed {
                let rows = reader.next_rows(max_rows);
                failed = rows.is_err();
                if sender.send(rows).is_err() {
                    return;
                }
            }
            while sender.send(Err(DataError::Closed)).is_ok() {}
        };
        let thread = std::thread::Builder::new().name("held-out".to_owned()).spawn(read);
        thread.map_err(|error| DataError::Threads { message: error.to_string() })?;
        Ok(Self { rows, cancel })
    }

    /// Returns the next rows; an empty list after the last. An error ends the rows, except [`DataError::Interrupted`],
    /// which loses nothing.
    pub(crate) fn next_rows(&self, interrupted: &dyn Fn() -> bool) -> Result<Vec<Row>, DataError> {
        receive(&self.rows, interrupted)
    }
}

impl Drop for PrefetchThread {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl RowFilter {
    /// Returns the first row of a row group to read; `None` if the row group is left out.
    fn first_row(&self, shard: usize, name: &str, row_group: u64) -> Option<u64> {
        match self {
            Self::All => Some(0),
            Self::HeldOut(split) => split.first_held_out_row(shard, name, row_group),
        }
    }
}

impl CurrentShard {
    fn new(reader: Box<dyn ShardReader>, index: usize) -> Self {
        let skipped = SkippedRows::default();
        Self { reader, index, row_group: 0, row: 0, positioned: false, skipped, has_document: false }
    }

    /// Reads the next row of the shard that passes the filter; `None` at the end of the shard.
    fn next_row(&mut self, filter: &RowFilter, name: &str) -> Result<Option<Row>, DataError> {
        let row_groups = self.reader.row_groups();
        loop {
            if row_groups.is_some_and(|row_groups| self.row_group >= row_groups) {
                return Ok(None);
            }
            let first_row = filter.first_row(self.index, name, self.row_group);
            // Where the number of row groups is unknown, only seeking tells whether this one exists.
            if !self.positioned && (first_row.is_some() || row_groups.is_none()) {
                self.row = first_row.unwrap_or(0);
                if !self.reader.seek(self.row_group, self.row)? {
                    return Ok(None);
                }
                self.positioned = true;
            }
            if first_row.is_some()
                && let Some(row) = self.reader.next_row()?
            {
                self.row += 1;
                return Ok(Some(row));
            }
            (self.row_group, self.row, self.positioned) = (self.row_group + 1, 0, false);
        }
    }
}
