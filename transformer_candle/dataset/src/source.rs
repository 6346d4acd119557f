//! A data source: a data set of the Hub at one commit, or local files, listed but not opened.

mod file_parts;
mod listing;
mod usable_rows;

use std::collections::BTreeSet;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use run_config::{DataFormat, FIRST_READING_VERSION};
use serde::{Deserialize, Serialize};

pub use self::file_parts::FilePart;

use crate::DataError;
use crate::byte_source::{ByteSource, LocalFile};
use crate::cancel::CancelToken;
use crate::formats::{Format, ReadingRules, ShardReader};
use crate::held_out_split::{HeldOutSplit, SplitSettings};
use crate::hub::{Repository, RetryStatus};

/// Shards opened at most to find one whose format names its fields.
const MAX_SHARDS_PROBED: usize = 16;

/// A data set whose shards are known. Cheap to clone; clones share the listing.
///
/// Reading it on the caller's thread ([`crate::Documents`], [`crate::HeldOut`], [`crate::audit`]) ends with
/// [`DataError::Interrupted`] when the token that it was opened with is cancelled.
#[derive(Clone)]
pub struct DataSource {
    listing: Arc<Listing>,
    cancel: CancelToken,
}

struct Listing {
    name: String,
    text_column: String,
    format: DataFormat,
    /// The version of the rules by which files become documents.
    reading_version: u32,
    skips_bad_files: bool,
    shards: Vec<Shard>,
    /// The parts of files that the shards are; empty if they are the files as listed.
    parts: Vec<FilePart>,
    location: Location,
    /// Held-out splits decided so far, kept because deciding may read many shards.
    held_out_splits: Mutex<Vec<(SplitSettings, Arc<HeldOutSplit>)>>,
    notes: Vec<String>,
    /// Shards of which it was told that none of their rows can be used.
    unusable: Mutex<BTreeSet<usize>>,
}

/// A file of the listing, or a part of one.
#[derive(Clone)]
pub(crate) struct Shard {
    /// Path in the repository, or relative to the folder that all local files have in common.
    pub name: String,
    /// The first byte that is read.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The first epoch that reads it.
    pub epoch: u64,
    format: Format,
}

enum Location {
    /// The path of each shard; none of a file that is gone.
    Local(Vec<Option<PathBuf>>),
    Hub(Repository),
}

/// The name, revision and size of a source, for people and for checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceDescription {
    /// The data set's name, or the patterns.
    pub name: String,
    /// The commit that is read; none for local files.
    pub revision: Option<String>,
    /// Number of shards.
    pub files: u64,
    /// Total size of the shards in bytes.
    pub bytes: u64,
}

impl DataSource {
    fn with_name(self, name: &str) -> Self {
        self.with(|listing| name.clone_into(&mut listing.name))
    }

    /// Returns the source with rows of this format. Must be called before the source is cloned.
    #[must_use]
    pub fn with_format(self, format: DataFormat) -> Self {
        self.with(|listing| listing.format = format)
    }

    /// Returns the source that skips files whose content cannot be decoded, or ends with an error there. By default those
    /// of reading version 2 skip them. Must be called before the source is cloned.
    #[must_use]
    pub fn with_bad_files_skipped(self, skips: bool) -> Self {
        self.with(|listing| listing.skips_bad_files = skips)
    }

    fn with(mut self, change: impl FnOnce(&mut Listing)) -> Self {
        if let Some(listing) = Arc::get_mut(&mut self.listing) {
            change(listing);
        }
        self
    }

    /// Notes on files that were left out of the listing, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.listing.notes
    }

    /// Returns the same data; reading it on the caller's thread is cancelled by `cancel`.
    pub(crate) fn cancelled_by(&self, cancel: &CancelToken) -> Self {
        Self { listing: Arc::clone(&self.listing), cancel: cancel.clone() }
    }

    /// The token that cancels reading on the caller's thread.
    pub(crate) fn cancel(&self) -> &CancelToken {
        &self.cancel
    }

    /// The name, revision and size of the source.
    pub fn describe(&self) -> SourceDescription {
        SourceDescription {
            name: self.listing.name.clone(),
            revision: self.revision().map(str::to_owned),
            files: self.listing.shards.len() as u64,
            bytes: self.listing.shards.iter().map(|file| file.bytes).sum(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.listing.name
    }

    pub(crate) fn text_column(&self) -> &str {
        &self.listing.text_column
    }

    /// The version of the rules by which files become documents.
    pub(crate) fn reading_version(&self) -> u32 {
        self.listing.reading_version
    }

    /// The commit of the Hub that is read; `None` for local files.
    pub(crate) fn revision(&self) -> Option<&str> {
        match &self.listing.location {
            Location::Hub(repository) => Some(repository.revision()),
            Location::Local(_) => None,
        }
    }

    /// Whether ledgers record the files: those of the Hub are known by their commit.
    pub(crate) fn records_files(&self) -> bool {
        self.listing.reading_version > FIRST_READING_VERSION && self.revision().is_none()
    }

    pub(crate) fn skips_bad_files(&self) -> bool {
        self.listing.skips_bad_files
    }

    /// The shards, in listing order.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.listing.shards
    }

    /// Held-out splits decided so far, for [`Self::held_out_split`].
    pub(crate) fn held_out_splits(&self) -> &Mutex<Vec<(SplitSettings, Arc<HeldOutSplit>)>> {
        &self.listing.held_out_splits
    }

    /// The request that has been failing for the longest time; none if all succeed.
    pub fn retry_status(&self) -> Option<RetryStatus> {
        match &self.listing.location {
            Location::Hub(repository) => repository.retry_status(),
            Location::Local(_) => None,
        }
    }

    fn rules(&self) -> ReadingRules {
        ReadingRules::new(self.listing.format, &self.listing.text_column, self.listing.reading_version)
    }

    /// Opens a shard by its index in the listing; the source's token cancels reading it.
    pub(crate) fn open(&self, shard: usize) -> Result<Box<dyn ShardReader>, DataError> {
        let Shard { name, offset, bytes, format, .. } = &self.listing.shards[shard];
        let source: Arc<dyn ByteSource> = match &self.listing.location {
            Location::Local(paths) => {
                let gone = || std::io::Error::new(ErrorKind::NotFound, "it was removed since the run began");
                let path = paths[shard].as_ref().ok_or_else(gone).map_err(DataError::io(Path::new(name)))?;
                Arc::new(LocalFile::open(name, path, (*offset, *bytes), &self.cancel)?)
            }
            Location::Hub(repository) => repository.open(name, *bytes, &self.cancel),
        };
        format.open(source, &self.rules(), &self.cancel)
    }
}

impl fmt::Debug for DataSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe().fmt(formatter)
    }
}
