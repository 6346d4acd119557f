//! Rows in listing order: all of them, or those that are held out.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use crate::cancel::{CancelToken, receive};
use crate::formats::{Row, ShardReader};
use crate::held_out_split::HeldOutSplit;
use crate::{DataError, DataSource};

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
    cancel: CancelToken,
}

struct CurrentShard {
    reader: Box<dyn ShardReader>,
    index: usize,
    row_group: u64,
    /// Whether the reader has been moved into the row group.
    positioned: bool,
}

impl SequentialReader {
    /// Reads every row.
    pub(crate) fn all(source: &DataSource, cancel: CancelToken) -> Self {
        let shards = 0..source.shards().len();
        Self::new(source, RowFilter::All, shards, cancel)
    }

    /// Reads the rows that `split` holds out.
    pub(crate) fn held_out(source: &DataSource, split: Arc<HeldOutSplit>, cancel: CancelToken) -> Self {
        let shards = split.held_out_shards();
        Self::new(source, RowFilter::HeldOut(split), shards, cancel)
    }

    fn new(source: &DataSource, filter: RowFilter, shards: Range<usize>, cancel: CancelToken) -> Self {
        Self { source: source.clone(), filter, shards, current: None, cancel }
    }

    /// Reads the next rows, at most `max_rows`; returns an empty list after the last.
    fn next_rows(&mut self, max_rows: usize) -> Result<Vec<Row>, DataError> {
        std::iter::from_fn(|| self.next_row().transpose()).take(max_rows).collect()
    }

    /// Reads the next row; `None` after the last.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            self.cancel.check()?;
            let mut current = match self.current.take() {
                Some(current) => current,
                None => match self.shards.next() {
                    Some(index) => {
                        let reader = self.source.open(index, &self.cancel)?;
                        CurrentShard { reader, index, row_group: 0, positioned: false }
                    }
                    None => return Ok(None),
                },
            };
            let row = current.next_row(&self.filter, &self.source.shards()[current.index].name)?;
            if row.is_some() {
                self.current = Some(current);
                return Ok(row);
            }
        }
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
        let cancel = reader.cancel.clone();
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
        let started = std::thread::Builder::new().name("held-out".to_owned()).spawn(read);
        started.map_err(|error| DataError::Threads { message: error.to_string() })?;
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
                if !self.reader.seek(self.row_group, first_row.unwrap_or(0))? {
                    return Ok(None);
                }
                self.positioned = true;
            }
            if first_row.is_some()
                && let Some(row) = self.reader.next_row()?
            {
                return Ok(Some(row));
            }
            (self.row_group, self.positioned) = (self.row_group + 1, false);
        }
    }
}
