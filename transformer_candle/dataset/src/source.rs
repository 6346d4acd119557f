//! A data source: a data set of the Hub at one commit, or local files, listed but not opened.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use run_config::{DataFormat, ResolvedRun, StreamingConfig};
use serde::{Deserialize, Serialize};

use crate::byte_source::{ByteSource, CancellableSource, LocalFile};
use crate::cache_folder::cache_root;
use crate::cancel::CancelToken;
use crate::error::MissingColumn;
use crate::formats::{Format, ReadingRules, ShardReader, count_separators};
use crate::held_out_split::{HeldOutSplit, SplitSettings};
use crate::hub::{HubSettings, Repository, RetryStatus};
use crate::local_files::{self, FolderSplit, ListingRules, LocalEntry, LocalListing};
use crate::{DataError, SkippedRows};

/// Name of the demo data set, which each machine makes for itself, in the cache folder.
const DEMO: &str = "demo";

/// Shards opened at most to find one whose format names its fields.
const MAX_SHARDS_PROBED: usize = 16;
/// Bytes of a text in which separators of documents are counted.
const SEPARATOR_PROBE_BYTES: u64 = 1 << 20;

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
    revision: Option<String>,
    text_column: String,
    format: DataFormat,
    /// The version of the rules by which files become documents.
    reading_version: u32,
    shards: Vec<Shard>,
    location: Location,
    /// Held-out splits decided so far, kept because deciding may read many shards.
    held_out_splits: Mutex<Vec<(SplitSettings, Arc<HeldOutSplit>)>>,
    notes: Vec<String>,
    /// Shards of which it was told that none of their rows can be used.
    unusable: Mutex<BTreeSet<usize>>,
}

/// A file of the listing.
pub(crate) struct Shard {
    /// Path in the repository, or relative to the folder that all local files have in common.
    pub name: String,
    pub bytes: u64,
    format: Format,
}

enum Location {
    Local(Vec<PathBuf>),
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
    /// Opens the validation data of a run; `None` unless `data.validation_shards` is set.
    pub fn validation_from_run(run: &ResolvedRun, cancel: &CancelToken) -> Result<Option<Self>, DataError> {
        let data = &run.config.data;
        if data.validation_shards.is_empty() {
            return Ok(None);
        }
        let (split, version) = (FolderSplit::Validation, data.reading_version());
        let (patterns, text_column) = (&data.validation_shards, &data.text_column);
        let source = Self::local_split(patterns, Path::new(""), &split, text_column, version, cancel)?;
        Ok(Some(source.with_format(data.format)))
    }

    /// Opens a data set by name: `demo` from the cache folder, anything else from the Hub. Requests the commit, the
    /// dataset card and the listing from the Hub; the source stays at this commit. Files become documents by the rules
    /// of `reading_version` (`data.reading_version`).
    pub fn streaming(
        streaming: &StreamingConfig,
        hub: HubSettings,
        reading_version: u32,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        if streaming.dataset == DEMO {
            return Self::demo(streaming, cache_root().join(DEMO), reading_version, cancel);
        }
        let repository = Repository::pin(hub, &streaming.dataset, streaming.revision.as_deref(), cancel)?;
        let listed = repository.files(streaming.config.as_deref(), &streaming.split, cancel)?;
        let shards = listed.into_iter().filter_map(|file| {
            Format::from_name(&file.path).map(|format| Shard { name: file.path, bytes: file.bytes, format })
        });
        let listing = Listing {
            name: streaming.dataset.clone(),
            revision: Some(repository.revision().to_owned()),
            text_column: streaming.text_column.clone(),
            format: DataFormat::Text,
            reading_version,
            shards: shards.collect(),
            location: Location::Hub(repository),
            held_out_splits: Mutex::default(),
            notes: Vec::new(),
            unusable: Mutex::default(),
        };
        Ok(Self { listing: Arc::new(listing), cancel: cancel.clone() })
    }

    fn demo(
        streaming: &StreamingConfig,
        folder: PathBuf,
        reading_version: u32,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        if streaming.revision.is_some() || streaming.config.is_some() {
            let setting = "the revision (--revision) or configuration (--data-config) of the data set demo";
            return Err(DataError::Setting {
                setting,
                must: "left out: this machine makes demo itself, in a single version",
            });
        }
        if streaming.split != "train" {
            let (name, available) = (DEMO.to_owned(), vec!["train".to_owned()]);
            return Err(DataError::Split { name, split: streaming.split.clone(), available });
        }
        match Self::local(&["*.parquet".to_owned()], &folder, &streaming.text_column, reading_version, cancel) {
            Err(DataError::NoFiles { .. }) => Err(DataError::NoDemo { folder }),
            source => source.map(|source| source.with_name(DEMO)),
        }
    }

    /// Lists files, folders and globs for training, as [`Self::local_split`] does.
    pub fn local(
        patterns: &[String],
        base: &Path,
        text_column: &str,
        reading_version: u32,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        Self::local_split(patterns, base, &FolderSplit::Train, text_column, reading_version, cancel)
    }

    /// Lists files, folders and globs; relative ones are relative to `base`. Folders are searched recursively, and their
    /// files of `split` are taken. Each file counts once, however many patterns and links lead to it. Files become
    /// documents by the rules of `reading_version` (`data.reading_version`).
    pub fn local_split(
        patterns: &[String],
        base: &Path,
        split: &FolderSplit,
        text_column: &str,
        reading_version: u32,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let rules = ListingRules { base, split, reading_version };
        let LocalListing { entries, mut notes } = local_files::list(patterns, rules, cancel)?;
        if reading_version >= 2 {
            notes.extend(note_separators(&entries)?);
        }
        let mut shards = Vec::with_capacity(entries.len());
        let mut paths = Vec::with_capacity(entries.len());
        for entry in entries {
            shards.push(Shard { name: entry.name, bytes: entry.bytes, format: entry.format });
            paths.push(entry.path);
        }
        let listing = Listing {
            name: patterns.join(", "),
            revision: None,
            text_column: text_column.to_owned(),
            format: DataFormat::Text,
            reading_version,
            shards,
            location: Location::Local(paths),
            held_out_splits: Mutex::default(),
            notes,
            unusable: Mutex::default(),
        };
        Ok(Self { listing: Arc::new(listing), cancel: cancel.clone() })
    }

    fn with_name(self, name: &str) -> Self {
        self.with(|listing| name.clone_into(&mut listing.name))
    }

    /// Returns the source with rows of this format. Must be called before the source is cloned.
    #[must_use]
    pub fn with_format(self, format: DataFormat) -> Self {
        self.with(|listing| listing.format = format)
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
            revision: self.listing.revision.clone(),
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

    /// Whether reading it requests something of the Hub.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self.listing.location, Location::Hub(_))
    }

    /// The shards, in listing order.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.listing.shards
    }

    /// Held-out splits decided so far, for [`Self::held_out_split`].
    pub(crate) fn held_out_splits(&self) -> &Mutex<Vec<(SplitSettings, Arc<HeldOutSplit>)>> {
        &self.listing.held_out_splits
    }

    /// Fails if rows are skipped because the first shard with fields lacks the columns that are read.
    pub(crate) fn check_columns(&self, skipped: SkippedRows, cancel: &CancelToken) -> Result<(), DataError> {
        match self.listing.format {
            DataFormat::Text if skipped.null + skipped.malformed > 0 => match self.missing_column(cancel)? {
                Some(missing) => Err(DataError::MissingColumn(missing)),
                None => Ok(()),
            },
            DataFormat::Chat if skipped.not_conversation > 0 => self.check_conversations(cancel),
            _ => Ok(()),
        }
    }

    /// Warns, once for a shard, that none of the rows that were read of it can be used.
    pub(crate) fn tell_unusable(&self, shard: usize, skipped: SkippedRows, cancel: &CancelToken) {
        let mut told = self.listing.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        if skipped.total() == 0 || !told.insert(shard) {
            return;
        }
        let lacks_text = skipped.null + skipped.malformed > 0;
        let fields =
            if lacks_text { self.open(shard, cancel).and_then(|mut file| file.fields()) } else { Ok(Vec::new()) };
        let texts = fields.unwrap_or_default().into_iter().filter(|field| field.non_string_type.is_none());
        let texts: Vec<String> = texts.map(|field| field.name).collect();
        let columns =
            if texts.is_empty() { String::new() } else { format!("; its text columns are {}", texts.join(", ")) };
        let (name, rows) = (&self.shards()[shard].name, skipped.total());
        tracing::warn!("no row of {name} can be used: of {rows} that were read, {skipped}{columns}");
    }

    fn check_conversations(&self, cancel: &CancelToken) -> Result<(), DataError> {
        for (index, file) in self.shards().iter().enumerate().take(MAX_SHARDS_PROBED) {
            let columns: Vec<String> =
                self.open(index, cancel)?.fields()?.into_iter().map(|field| field.name).collect();
            let names: Vec<&str> = columns.iter().map(String::as_str).collect();
            if !columns.is_empty() {
                let found = self.rules().has_conversations(&names);
                return if found {
                    Ok(())
                } else {
                    Err(DataError::NoConversations { file: file.name.clone(), columns })
                };
            }
        }
        Ok(())
    }

    fn missing_column(&self, cancel: &CancelToken) -> Result<Option<MissingColumn>, DataError> {
        for (index, file) in self.shards().iter().enumerate().take(MAX_SHARDS_PROBED) {
            let fields = self.open(index, cancel)?.fields()?;
            if !fields.is_empty() {
                let named = fields.iter().find(|field| field.name == self.text_column());
                let found = named.map(|field| field.non_string_type);
                let available = fields.iter().filter(|field| field.non_string_type.is_none());
                // The first rows alone are without text, as far as can be seen.
                let is_present = match found {
                    Some(None) => true,
                    Some(Some("null")) => available.clone().next().is_none(),
                    _ => false,
                };
                return Ok((!is_present).then(|| MissingColumn {
                    file: file.name.clone(),
                    column: self.text_column().to_owned(),
                    found: found.flatten(),
                    available: available.map(|field| field.name.clone()).collect(),
                }));
            }
        }
        Ok(None)
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

    /// Opens a shard by its index in the listing; `cancel` cancels reading it.
    pub(crate) fn open(&self, shard: usize, cancel: &CancelToken) -> Result<Box<dyn ShardReader>, DataError> {
        let Shard { name, bytes, format } = &self.listing.shards[shard];
        let source: Arc<dyn ByteSource> = match &self.listing.location {
            Location::Local(paths) => Arc::new(LocalFile::open(name, &paths[shard], *bytes)?),
            Location::Hub(repository) => repository.open(name, *bytes, cancel),
        };
        let source = Arc::new(CancellableSource::new(source, cancel.clone()));
        format.open(source, &self.rules(), cancel)
    }
}

/// Returns a note on the texts in which `<|endoftext|>` separates documents.
fn note_separators(entries: &[LocalEntry]) -> Result<Option<String>, DataError> {
    let (mut files, mut separators, mut is_part) = (Vec::new(), 0, false);
    let texts = entries.iter().filter(|entry| entry.format == Format::Text);
    for entry in texts.take(MAX_SHARDS_PROBED) {
        let file = LocalFile::open(&entry.name, &entry.path, entry.bytes)?;
        let count = count_separators(&file, SEPARATOR_PROBE_BYTES)?;
        if count > 0 {
            files.push(entry.name.as_str());
            separators += count;
            is_part |= entry.bytes > SEPARATOR_PROBE_BYTES;
        }
    }
    let part = if is_part { ", in the first MiB of each" } else { "" };
    Ok((!files.is_empty()).then(|| {
        format!(
            "<|endoftext|> separates the documents of {} ({separators} of them{part}): it is no text",
            files.join(", ")
        )
    }))
}

impl fmt::Debug for DataSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe().fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use run_config::NEWEST_READING_VERSION;

    use super::*;

    fn streaming(dataset: &str, split: &str) -> StreamingConfig {
        StreamingConfig {
            dataset: dataset.to_owned(),
            split: split.to_owned(),
            max_samples: None,
            stream_batch_size: 1,
            experiment: "e".to_owned(),
            config: None,
            revision: None,
            text_column: "text".to_owned(),
            tokenizer: None,
        }
    }

    #[test]
    fn demo_is_the_parquet_files_of_its_folder() {
        let never = CancelToken::new();
        let folder = tempfile::tempdir().unwrap();
        let missing =
            DataSource::demo(&streaming(DEMO, "train"), folder.path().join("demo"), NEWEST_READING_VERSION, &never)
                .unwrap_err();
        assert!(missing.to_string().contains("orchestrate --stream --dataset demo"), "{missing}");
        std::fs::write(folder.path().join("shard-0.parquet"), "0123456789").unwrap();
        let source =
            DataSource::demo(&streaming(DEMO, "train"), folder.path().to_owned(), NEWEST_READING_VERSION, &never)
                .unwrap();
        let expected = SourceDescription { name: DEMO.to_owned(), revision: None, files: 1, bytes: 10 };
        assert_eq!(source.describe(), expected);
        let split =
            DataSource::demo(&streaming(DEMO, "test"), folder.path().to_owned(), NEWEST_READING_VERSION, &never)
                .unwrap_err();
        assert!(matches!(split, DataError::Split { .. }));
        let pinned = StreamingConfig { revision: Some("abc".to_owned()), ..streaming(DEMO, "train") };
        let configured = StreamingConfig { config: Some("abc".to_owned()), ..streaming(DEMO, "train") };
        for refused in [pinned, configured] {
            let error =
                DataSource::demo(&refused, folder.path().to_owned(), NEWEST_READING_VERSION, &never).unwrap_err();
            assert!(matches!(error, DataError::Setting { .. }), "{error}");
        }
    }

    #[test]
    fn offline_and_invalid_names_make_no_request() {
        let offline = HubSettings { offline: true, ..HubSettings::default() };
        let never = CancelToken::new();
        let error =
            DataSource::streaming(&streaming("owner/name", "train"), offline.clone(), NEWEST_READING_VERSION, &never)
                .unwrap_err();
        assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
        let error =
            DataSource::streaming(&streaming("../name", "train"), offline, NEWEST_READING_VERSION, &never).unwrap_err();
        assert!(matches!(error, DataError::DatasetName { .. }), "{error}");
    }
}
