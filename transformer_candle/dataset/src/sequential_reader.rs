//! Rows in listing order: all of them, or those that are held out.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use crate::cancel::{CancelToken, receive};
use crate::formats::{DocumentFile, Row};
use crate::held_out_split::Selection;
use crate::{DataError, DataSource};

/// Which rows are walked.
enum Which {
    All,
    HeldOut(Arc<Selection>),
}

/// Reads one file after the other; holds one open.
pub(crate) struct Walk {
    source: DataSource,
    which: Which,
    files: Range<usize>,
    open: Option<Open>,
    cancel: CancelToken,
}

struct Open {
    file: Box<dyn DocumentFile>,
    index: usize,
    group: u64,
    /// The file stands inside the group.
    there: bool,
}

impl Walk {
    /// Every row.
    pub(crate) fn all(source: &DataSource, cancel: CancelToken) -> Self {
        let files = 0..source.files().len();
        Self::over(source, Which::All, files, cancel)
    }

    /// The rows that a selection holds out.
    pub(crate) fn held_out(source: &DataSource, selection: Arc<Selection>, cancel: CancelToken) -> Self {
        let files = selection.held_out_files();
        Self::over(source, Which::HeldOut(selection), files, cancel)
    }

    fn over(source: &DataSource, which: Which, files: Range<usize>, cancel: CancelToken) -> Self {
        Self { source: source.clone(), which, files, open: None, cancel }
    }

    /// The next `most` rows; fewer, then none, at the end.
    fn next_rows(&mut self, most: usize) -> Result<Vec<Row>, DataError> {
        std::iter::from_fn(|| self.next_row().transpose()).take(most).collect()
    }

    /// The next row; none after the last.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            self.cancel.check()?;
            let mut open = match self.open.take() {
                Some(open) => open,
                None => match self.files.next() {
                    Some(index) => {
                        let file = self.source.open(index, &self.cancel)?;
                        Open { file, index, group: 0, there: false }
                    }
                    None => return Ok(None),
                },
            };
            let row = open.next_row(&self.which, &self.source.files()[open.index].name)?;
            if row.is_some() {
                self.open = Some(open);
                return Ok(row);
            }
        }
    }
}

/// A walk in a thread of its own, so that waiting for it can be interrupted. Reads once ahead.
pub(crate) struct WalkThread {
    rows: Receiver<Result<Vec<Row>, DataError>>,
    cancel: CancelToken,
}

impl WalkThread {
    /// Reads `most` rows at a time.
    pub(crate) fn start(mut walk: Walk, most: usize) -> Result<Self, DataError> {
        let (sender, rows) = sync_channel(0);
        let cancel = walk.cancel.clone();
        let read = move || {
            let mut failed = false;
            // Ends where nobody receives any more.
            while !failed {
                let rows = walk.next_rows(most);
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

    /// The next rows, none at the end. After an error there are no more; [`DataError::Interrupted`] loses nothing.
    pub(crate) fn next_rows(&self, interrupted: &dyn Fn() -> bool) -> Result<Vec<Row>, DataError> {
        receive(&self.rows, interrupted)
    }
}

impl Drop for WalkThread {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Which {
    /// The row from which on a group is walked; none if it is not.
    fn from(&self, file: usize, name: &str, group: u64) -> Option<u64> {
        match self {
            Self::All => Some(0),
            Self::HeldOut(selection) => selection.held_out_from(file, name, group),
        }
    }
}

impl Open {
    /// The next row of the file that is walked; none at its end.
    fn next_row(&mut self, which: &Which, name: &str) -> Result<Option<Row>, DataError> {
        let groups = self.file.groups();
        loop {
            if groups.is_some_and(|groups| self.group >= groups) {
                return Ok(None);
            }
            let from = which.from(self.index, name, self.group);
            // Where the number of groups is not known only seeking one tells whether it is there.
            if !self.there && (from.is_some() || groups.is_none()) {
                if !self.file.seek(self.group, from.unwrap_or(0))? {
                    return Ok(None);
                }
                self.there = true;
            }
            if from.is_some()
                && let Some(row) = self.file.next_row()?
            {
                return Ok(Some(row));
            }
            (self.group, self.there) = (self.group + 1, false);
        }
    }
}
