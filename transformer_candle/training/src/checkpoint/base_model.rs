//! `base_model.json`: the model that a checkpoint of adapters belongs to, with size and SHA-256 of each of its files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use model::hugging_face::weight_files;
use serde::{Deserialize, Serialize};

use super::files::{self, pretty};
use super::manifest::{FileRecord, Manifest, VerifiedFile};
use crate::error::checkpoint::{CheckpointError, Result, from_model_error};

/// A record of a frozen model's files, as they were when adapters began to train beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseModel {
    /// Its directory.
    pub directory: PathBuf,
    /// Size and SHA-256 of its `config.json` and its weight files, by name.
    files: BTreeMap<String, FileRecord>,
}

impl BaseModel {
    /// Records a model whose weight files have just been read and hashed.
    pub(super) fn of_weights(directory: &Path, mut files: BTreeMap<String, FileRecord>) -> Result<Self> {
        let config = VerifiedFile::open(directory, files::CONFIG, None, &CancelToken::new())?.record()?;
        files.insert(files::CONFIG.to_owned(), config);
        Ok(Self { directory: directory.to_owned(), files })
    }

    /// Records a model and reads its files once, unless cancelled. Those of a checkpoint are known from its manifest.
    fn measure(directory: &Path, cancel: &CancelToken) -> Result<Self> {
        let has_manifest = directory.join(files::MANIFEST).exists();
        let manifest = has_manifest.then(|| Manifest::load(directory)).transpose()?;
        let paths = weight_files(directory).map_err(|error| from_model_error(directory, error))?;
        let names = paths.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let record = |name: String| {
            let listed_record = manifest.as_ref().and_then(|manifest| manifest.files.get(&name).cloned());
            let record =
                listed_record.map_or_else(|| VerifiedFile::open(directory, &name, None, cancel)?.record(), Ok)?;
            Ok((name, record))
        };
        let files = names.chain([files::CONFIG.to_owned()]).map(record).collect::<Result<_>>()?;
        Ok(Self { directory: directory.to_owned(), files })
    }

    /// The same record, with the model in another directory.
    #[must_use]
    pub fn moved_to(self, directory: &Path) -> Self {
        Self { directory: directory.to_owned(), ..self }
    }

    /// Compares the model's files with the record, unless cancelled; `adapters` is the adapters' directory, for errors.
    ///
    /// # Errors
    /// [`CheckpointError::BaseMoved`], [`CheckpointError::BaseChanged`]
    pub fn verify(&self, adapters: &Path, cancel: &CancelToken) -> Result<()> {
        self.verify_sizes(adapters)?;
        self.compare(adapters, &Self::measure(&self.directory, cancel)?)
    }

    /// Looks for the model's files and compares their sizes, without reading them.
    ///
    /// # Errors
    /// Those of [`BaseModel::verify`].
    pub(super) fn verify_sizes(&self, adapters: &Path) -> Result<()> {
        let (adapters, base) = (adapters.to_owned(), self.directory.clone());
        if !base.join(files::CONFIG).exists() {
            return Err(CheckpointError::BaseMoved { adapters, base });
        }
        let has_size = |name: &str, bytes| fs::metadata(base.join(name)).is_ok_and(|file| file.len() == bytes);
        match self.files.iter().find(|(name, record)| !has_size(name, record.bytes)) {
            Some((name, _)) => Err(CheckpointError::BaseChanged { adapters, file: name.clone(), base }),
            None => Ok(()),
        }
    }

    /// Compares the record with that of the model found in its directory.
    pub(super) fn compare(&self, adapters: &Path, other: &Self) -> Result<()> {
        match self.files.iter().find(|(name, record)| other.files.get(*name) != Some(record)) {
            Some((name, _)) => {
                let (adapters, base) = (adapters.to_owned(), self.directory.clone());
                Err(CheckpointError::BaseChanged { adapters, base, file: name.clone() })
            }
            None => Ok(()),
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        pretty(self)
    }

    pub(super) fn from_bytes(adapters: &Path, bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes)
            .map_err(|error| CheckpointError::corrupted(adapters, format!("{}: {error}", files::BASE_MODEL)))
    }
}
