//! Lists the files of a source: a data set of the Hub, the demo data set, or local files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use run_config::{DataFormat, FIRST_READING_VERSION, ResolvedRun, StreamingConfig};

use super::{DataSource, Listing, Location, MAX_SHARDS_PROBED, Shard};
use crate::DataError;
use crate::byte_source::LocalFile;
use crate::cache_folder::cache_root;
use crate::cancel::CancelToken;
use crate::formats::{Format, count_separators};
use crate::hub::{HubSettings, Repository};
use crate::local_files::{self, FolderSplit, ListingRules, LocalEntry, LocalListing};

/// Name of the demo data set, which each machine makes for itself, in the cache folder.
const DEMO: &str = "demo";
/// Bytes of a text in which separators of documents are counted.
const SEPARATOR_PROBE_BYTES: u64 = 1 << 20;

impl Shard {
    fn whole(name: String, bytes: u64, format: Format) -> Self {
        Self { name, offset: 0, bytes, epoch: 0, format }
    }
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
        Ok(Some(source.with_format(data.format).with_bad_files_skipped(data.skips_bad_files())))
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
        let shards = listed
            .into_iter()
            .filter_map(|file| Format::from_name(&file.path).map(|format| Shard::whole(file.path, file.bytes, format)));
        let (name, shards) = (streaming.dataset.clone(), shards.collect());
        Ok(Self::new(name, &streaming.text_column, reading_version, (shards, Location::Hub(repository)), cancel))
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
        let rules = ListingRules { base, split, reading_version, cancel };
        let LocalListing { entries, mut notes } = local_files::list(patterns, rules)?;
        if reading_version >= 2 {
            notes.extend(note_separators(&entries, cancel)?);
        }
        let mut shards = Vec::with_capacity(entries.len());
        let mut paths = Vec::with_capacity(entries.len());
        for entry in entries {
            shards.push(Shard::whole(entry.name, entry.bytes, entry.format));
            paths.push(Some(entry.path));
        }
        let listed = (shards, Location::Local(paths));
        let source = Self::new(patterns.join(", "), text_column, reading_version, listed, cancel);
        Ok(source.with(|listing| listing.notes = notes))
    }

    /// Makes a source of text of what was listed, with the defaults of a reading version.
    pub(super) fn new(
        name: String,
        text_column: &str,
        reading_version: u32,
        (shards, location): (Vec<Shard>, Location),
        cancel: &CancelToken,
    ) -> Self {
        let listing = Listing {
            name,
            text_column: text_column.to_owned(),
            format: DataFormat::Text,
            reading_version,
            skips_bad_files: reading_version > FIRST_READING_VERSION,
            shards,
            parts: Vec::new(),
            location,
            held_out_splits: Mutex::default(),
            notes: Vec::new(),
            unusable: Mutex::default(),
        };
        Self { listing: Arc::new(listing), cancel: cancel.clone() }
    }
}

/// Returns a note on the texts in which `<|endoftext|>` separates documents.
fn note_separators(entries: &[LocalEntry], cancel: &CancelToken) -> Result<Option<String>, DataError> {
    let (mut files, mut separators, mut is_part) = (Vec::new(), 0, false);
    let texts = entries.iter().filter(|entry| entry.format == Format::Text);
    for entry in texts.take(MAX_SHARDS_PROBED) {
        let file = LocalFile::open(&entry.name, &entry.path, (0, entry.bytes), cancel)?;
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

#[cfg(test)]
mod tests {
    use run_config::NEWEST_READING_VERSION;

    use super::*;
    use crate::SourceDescription;

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
        let error =
            DataSource::demo(&streaming(DEMO, "train"), folder.path().join("demo"), NEWEST_READING_VERSION, &never)
                .unwrap_err();
        assert!(error.to_string().contains("orchestrate --stream --dataset demo"), "{error}");
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
