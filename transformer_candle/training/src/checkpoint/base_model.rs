//! `base_model.json`: the model that a checkpoint of adapters belongs to, with size and SHA-256 of each of its files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use model::hugging_face::weight_files;
use serde::{Deserialize, Serialize};

use super::files::{self, pretty};
use super::manifest::{FileRecord, Manifest, VerifiedFile};
use crate::error::checkpoint::{CheckpointError, Result, from_model_error};

/// A frozen model, as it was when adapters began to train beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseModel {
    /// Its directory.
    pub directory: PathBuf,
    /// Its `config.json` and its weights, by name.
    files: BTreeMap<String, FileRecord>,
}

impl BaseModel {
    /// Reads a model directory's files once, unless cancelled. A checkpoint's are known from its manifest.
    pub fn measure(directory: &Path, cancel: &CancelToken) -> Result<Self> {
        let has_manifest = directory.join(files::MANIFEST).exists();
        let manifest = has_manifest.then(|| Manifest::load(directory)).transpose()?;
        let paths = weight_files(directory).map_err(|error| from_model_error(directory, error))?;
        let names = paths.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let record = |name: String| {
            let known = manifest.as_ref().and_then(|manifest| manifest.files.get(&name).cloned());
            let record = known.map_or_else(|| VerifiedFile::open(directory, &name, None, cancel)?.record(), Ok)?;
            Ok((name, record))
        };
        let files = names.chain([files::CONFIG.to_owned()]).map(record).collect::<Result<_>>()?;
        Ok(Self { directory: directory.to_owned(), files })
    }

    /// The same model in another place.
    #[must_use]
    pub fn moved_to(self, directory: &Path) -> Self {
        Self { directory: directory.to_owned(), ..self }
    }

    /// Compares the model's files with what they were, unless cancelled; `adapters` is the directory that belongs to it.
    ///
    /// # Errors
    /// [`CheckpointError::BaseMoved`], [`CheckpointError::BaseChanged`]
    pub fn verify(&self, adapters: &Path, cancel: &CancelToken) -> Result<()> {
        let (adapters, base) = (adapters.to_owned(), self.directory.clone());
        if !base.join(files::CONFIG).exists() {
            return Err(CheckpointError::BaseMoved { adapters, base });
        }
        let changed = |file: &str| CheckpointError::BaseChanged { adapters, base, file: file.to_owned() };
        match Self::measure(&self.directory, cancel) {
            Ok(now) => match self.files.iter().find(|(name, record)| now.files.get(*name) != Some(record)) {
                Some((name, _)) => Err(changed(name)),
                None => Ok(()),
            },
            Err(CheckpointError::Interrupted) => Err(CheckpointError::Interrupted),
            // Files that are missing or cannot be read.
            Err(error) => match self.files.keys().find(|name| !self.directory.join(name).exists()) {
                Some(name) => Err(changed(name)),
                None => Err(error),
            },
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
