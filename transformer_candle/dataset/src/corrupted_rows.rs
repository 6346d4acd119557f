//! Corrupted rows: parts of shards whose content cannot be decoded, which a stream skips and records.
//!
//! Only content that cannot be decoded is skipped ([`DataError::Format`], after repeated reads): a shard whose footer is
//! corrupted or whose content does not match its extension, or a part of one. Where row groups can be read on their own
//! (Parquet, JSON Lines) the rest of the row group is skipped, elsewhere the rest of the shard. Errors of networks, disks
//! and permissions are never skipped.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::formats::ShardReader;
use crate::{DataError, DataSource};

/// Bad files are skipped up to this fraction of all files, as a divisor.
const MAX_BAD_FRACTION: usize = 20;
/// Bad files that a message names.
const MAX_NAMED: usize = 5;

/// Rows of a shard that are skipped because they cannot be decoded: those of a row group from a row on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorruptedRows {
    /// Index of the shard in the listing.
    #[serde(rename = "file")]
    pub shard: u64,
    /// Index of the row group in the shard.
    #[serde(rename = "group")]
    pub row_group: u64,
    /// The first row that is skipped.
    #[serde(rename = "row")]
    pub first_row: u64,
    /// Whether all later row groups of the shard are skipped too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rest_of_shard: bool,
    /// The epoch in which they were found.
    pub epoch: u64,
    /// The window of the epoch in which they were found: they are skipped in this one and in all later ones.
    pub window: u64,
}

/// Corrupted rows that were found while a window was read, and what is wrong with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundCorruption {
    /// The name of the shard.
    #[serde(rename = "name")]
    pub file: String,
    /// What is wrong, in words.
    pub problem: String,
    /// The rows.
    #[serde(flatten)]
    pub rows: CorruptedRows,
}

impl CorruptedRows {
    /// Whether no row of the shard can be read.
    fn is_whole_shard(&self) -> bool {
        self.rest_of_shard && (self.row_group, self.first_row) == (0, 0)
    }

    /// Describes the rows: `all rows`, `rows from row 5 of row group 2 on`.
    fn describe(&self) -> String {
        let Self { row_group, first_row, rest_of_shard, .. } = self;
        match (rest_of_shard, self.is_whole_shard()) {
            (_, true) => "all of its rows".to_owned(),
            (true, _) => format!("its rows from row {first_row} of row group {row_group} on"),
            (false, _) => format!("the rows of row group {row_group} from row {first_row} on"),
        }
    }
}

impl FoundCorruption {
    /// Describes rows that could not be decoded because of this error.
    pub(crate) fn new(rows: CorruptedRows, file: &str, error: &DataError) -> Self {
        let problem = match error {
            DataError::Format { message, .. } => message.clone(),
            other => other.to_string(),
        };
        Self { rows, file: file.to_owned(), problem }
    }

    /// The warning for the user.
    pub fn warning(&self) -> String {
        let Self { rows, file, problem } = self;
        let rows = rows.describe();
        format!("{file} is corrupted, or its content does not match its extension: {problem}; {rows} are skipped")
    }
}

/// Returns the first corrupted row of a row group; `None` if it has none.
pub(crate) fn first_corrupted_row(corrupted: &[CorruptedRows], shard: usize, row_group: u64) -> Option<u64> {
    let of_shard = corrupted.iter().filter(|rows| rows.shard == shard as u64);
    let first = of_shard.filter_map(|rows| match rows.row_group.cmp(&row_group) {
        std::cmp::Ordering::Equal => Some(rows.first_row),
        std::cmp::Ordering::Less if rows.rest_of_shard => Some(0),
        _ => None,
    });
    first.min()
}

/// Whether no row of a shard can be read.
pub(crate) fn is_whole_shard_corrupted(corrupted: &[CorruptedRows], shard: usize) -> bool {
    corrupted.iter().any(|rows| rows.shard == shard as u64 && rows.is_whole_shard())
}

impl DataSource {
    /// Whether this error of one shard is skipped. A source of a single file has nothing else to read.
    pub(crate) fn skips(&self, error: &DataError) -> bool {
        matches!(error, DataError::Format { .. }) && self.skips_bad_files() && self.shards().len() > 1
    }

    /// Opens a shard; `None` if it was removed, or is corrupted and skipped.
    pub(crate) fn open_intact(&self, shard: usize) -> Result<Option<Box<dyn ShardReader>>, DataError> {
        match self.open(shard) {
            Err(error) if self.skips(&error) || self.is_removed(shard) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Fails where the corrupted shards are too many: all of them, or two or more and over 5 %.
    pub(crate) fn check_corrupted<'a>(
        &self,
        corrupted: impl IntoIterator<Item = &'a CorruptedRows>,
        last: Option<&FoundCorruption>,
    ) -> Result<(), DataError> {
        let bad: BTreeSet<u64> = corrupted.into_iter().map(|rows| rows.shard).collect();
        let files = self.shards().len();
        let too_many = bad.len() >= 2 && bad.len() * MAX_BAD_FRACTION > files;
        if bad.is_empty() || !(too_many || bad.len() == files) {
            return Ok(());
        }
        let shard = |&shard: &u64| self.shards().get(shard as usize);
        let mut names: Vec<String> =
            bad.iter().filter_map(shard).take(MAX_NAMED).map(|shard| shard.name.clone()).collect();
        if bad.len() > names.len() {
            names.push("...".to_owned());
        }
        let (name, names) = (self.name().to_owned(), names.join(", "));
        let last = last.map_or_else(String::new, |last| format!(" (the last one: {})", last.problem));
        Err(DataError::TooManyBadFiles { name, bad: bad.len(), files, names, last })
    }
}
