//! Rows in listing order: all of them, or those that are held out.

use std::ops::Range;
use std::sync::Arc;

use crate::formats::{DocumentFile, Row};
use crate::selection::Selection;
use crate::stop::Stop;
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
    pub(crate) fn all(source: &DataSource) -> Self {
        let files = 0..source.files().len();
        Self { source: source.clone(), which: Which::All, files, open: None }
    }

    /// The rows that a selection holds out.
    pub(crate) fn held_out(source: &DataSource, selection: Arc<Selection>) -> Self {
        let files = selection.held_out_files();
        Self { source: source.clone(), which: Which::HeldOut(selection), files, open: None }
    }

    /// The next row; none after the last.
    pub(crate) fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            let mut open = match self.open.take() {
                Some(open) => open,
                None => match self.files.next() {
                    Some(index) => {
                        let file = self.source.open(index, &Stop::default())?;
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
