//! What to read: a data set of the Hub at one commit, or files of this machine, listed but not yet opened.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use run_config::{ResolvedRun, StreamingConfig};
use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::byte_source::{ByteSource, LocalFile};
use crate::cache::cache_root;
use crate::formats::{DocumentFile, Format};
use crate::hub::{HubSettings, Repository, Waiting};
use crate::local;
use crate::selection::{Selection, Wanted};
use crate::stop::Stop;

/// The name of the data set that every machine can make for itself; it lies in the cache folder.
const DEMO: &str = "demo";

/// A data set whose files are known. Cheap to clone; cloning shares.
#[derive(Clone)]
pub struct DataSource(Arc<Listing>);

struct Listing {
    name: String,
    revision: Option<String>,
    text_column: String,
    files: Vec<SourceFile>,
    place: Place,
    /// What was decided before: deciding may read many files.
    selections: Mutex<Vec<(Wanted, Arc<Selection>)>>,
}

/// A file of the listing.
pub(crate) struct SourceFile {
    /// Its path in the repository, or below the folder that all local files share.
    pub name: String,
    pub bytes: u64,
    format: Format,
}

enum Place {
    Local(Vec<PathBuf>),
    Hub(Repository),
}

/// What a source is, for people and for checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceDescription {
    /// The data set's name, or the patterns.
    pub name: String,
    /// The commit that is read; none for local files.
    pub revision: Option<String>,
    /// How many files.
    pub files: u64,
    /// Their size together.
    pub bytes: u64,
}

impl DataSource {
    /// The validation data of a run, where `data.validation_shards` names some.
    pub fn validation_from_run(run: &ResolvedRun) -> Result<Option<Self>, DataError> {
        let data = &run.config.data;
        if data.validation_shards.is_empty() {
            return Ok(None);
        }
        Self::local(&data.validation_shards, Path::new(""), &data.text_column).map(Some)
    }

    /// A data set by name: `demo` from the cache folder, anything else from the Hub. The Hub is asked for the commit, the
    /// card and the listing; the commit stays the same for as long as the source lives.
    pub fn streaming(streaming: &StreamingConfig, hub: HubSettings) -> Result<Self, DataError> {
        if streaming.dataset == DEMO {
            return Self::demo(streaming, cache_root().join(DEMO));
        }
        let repository = Repository::pin(hub, &streaming.dataset, streaming.revision.as_deref())?;
        let listed = repository.files(streaming.config.as_deref(), &streaming.split)?;
        let files = listed.into_iter().filter_map(|file| {
            Format::of(&file.path).map(|format| SourceFile { name: file.path, bytes: file.bytes, format })
        });
        Ok(Self(Arc::new(Listing {
            name: streaming.dataset.clone(),
            revision: Some(repository.revision().to_owned()),
            text_column: streaming.text_column.clone(),
            files: files.collect(),
            place: Place::Hub(repository),
            selections: Mutex::default(),
        })))
    }

    fn demo(streaming: &StreamingConfig, folder: PathBuf) -> Result<Self, DataError> {
        if streaming.revision.is_some() || streaming.config.is_some() {
            let setting = "the revision (--revision) or configuration (--data-config) of the data set demo";
            return Err(DataError::Setting {
                setting,
                must: "left out: this machine makes demo itself, and there is only one",
            });
        }
        if streaming.split != "train" {
            let (name, available) = (DEMO.to_owned(), vec!["train".to_owned()]);
            return Err(DataError::Split { name, split: streaming.split.clone(), available });
        }
        match Self::local(&["*.parquet".to_owned()], &folder, &streaming.text_column) {
            Err(DataError::NoFiles { .. }) => Err(DataError::NoDemo { folder }),
            source => source.map(|source| source.renamed(DEMO)),
        }
    }

    /// Files, folders and globs; relative ones are relative to `base`. Folders are searched to any depth.
    pub fn local(patterns: &[String], base: &Path, text_column: &str) -> Result<Self, DataError> {
        let entries = local::list(patterns, base)?;
        let mut files = Vec::with_capacity(entries.len());
        let mut paths = Vec::with_capacity(entries.len());
        for entry in entries {
            // `list` names only files whose format is known.
            let Some(format) = Format::of(&entry.name) else {
                continue;
            };
            files.push(SourceFile { name: entry.name, bytes: entry.bytes, format });
            paths.push(entry.path);
        }
        Ok(Self(Arc::new(Listing {
            name: patterns.join(", "),
            revision: None,
            text_column: text_column.to_owned(),
            files,
            place: Place::Local(paths),
            selections: Mutex::default(),
        })))
    }

    fn renamed(self, name: &str) -> Self {
        match Arc::try_unwrap(self.0) {
            Ok(listing) => Self(Arc::new(Listing { name: name.to_owned(), ..listing })),
            Err(shared) => Self(shared),
        }
    }

    /// The name, revision and size of the source.
    pub fn describe(&self) -> SourceDescription {
        SourceDescription {
            name: self.0.name.clone(),
            revision: self.0.revision.clone(),
            files: self.0.files.len() as u64,
            bytes: self.0.files.iter().map(|file| file.bytes).sum(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn text_column(&self) -> &str {
        &self.0.text_column
    }

    /// In listing order.
    pub(crate) fn files(&self) -> &[SourceFile] {
        &self.0.files
    }

    /// Who is trained on and who is held out; the stream and the evaluation of a run ask for the same.
    pub(crate) fn selection(&self, wanted: Wanted, stop: &Stop) -> Result<Arc<Selection>, DataError> {
        let mut known = self.0.selections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, selection)) = known.iter().find(|(other, _)| *other == wanted) {
            return Ok(Arc::clone(selection));
        }
        let selection = Arc::new(Selection::of(self, wanted, stop)?);
        known.push((wanted, Arc::clone(&selection)));
        Ok(selection)
    }

    /// What reading waits for while the Hub or the network fails.
    pub fn waiting(&self) -> Option<Waiting> {
        match &self.0.place {
            Place::Hub(repository) => repository.waiting(),
            Place::Local(_) => None,
        }
    }

    /// Opens a file by its place in the listing; `stop` ends its waiting for the network.
    pub(crate) fn open(&self, file: usize, stop: &Stop) -> Result<Box<dyn DocumentFile>, DataError> {
        let SourceFile { name, bytes, format } = &self.0.files[file];
        let source: Arc<dyn ByteSource> = match &self.0.place {
            Place::Local(paths) => Arc::new(LocalFile::open(name, &paths[file], *bytes)?),
            Place::Hub(repository) => repository.open(name, *bytes, stop),
        };
        format.open(source, &self.0.text_column)
    }
}

impl fmt::Debug for DataSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe().fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
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
    fn the_demo_is_the_parquet_files_of_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let missing = DataSource::demo(&streaming(DEMO, "train"), folder.path().join("demo")).unwrap_err();
        assert!(missing.to_string().contains("orchestrate --stream --dataset demo"), "{missing}");
        std::fs::write(folder.path().join("shard-0.parquet"), "0123456789").unwrap();
        let source = DataSource::demo(&streaming(DEMO, "train"), folder.path().to_owned()).unwrap();
        let expected = SourceDescription { name: DEMO.to_owned(), revision: None, files: 1, bytes: 10 };
        assert_eq!(source.describe(), expected);
        let split = DataSource::demo(&streaming(DEMO, "test"), folder.path().to_owned()).unwrap_err();
        assert!(matches!(split, DataError::Split { .. }));
        let pinned = StreamingConfig { revision: Some("abc".to_owned()), ..streaming(DEMO, "train") };
        let configured = StreamingConfig { config: Some("abc".to_owned()), ..streaming(DEMO, "train") };
        for refused in [pinned, configured] {
            let error = DataSource::demo(&refused, folder.path().to_owned()).unwrap_err();
            assert!(matches!(error, DataError::Setting { .. }), "{error}");
        }
    }

    #[test]
    fn the_hub_is_not_asked_when_offline_or_for_names_that_cannot_be() {
        let offline = HubSettings { offline: true, ..HubSettings::default() };
        let error = DataSource::streaming(&streaming("owner/name", "train"), offline.clone()).unwrap_err();
        assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
        let error = DataSource::streaming(&streaming("../name", "train"), offline).unwrap_err();
        assert!(matches!(error, DataError::DatasetName { .. }), "{error}");
    }
}
