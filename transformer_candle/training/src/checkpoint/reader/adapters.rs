//! Reads adapters from checkpoints and from directories of peft, and finds the model that they belong to.

use std::path::{Path, PathBuf};

use dataset::CancelToken;
use model::ModelShape;
use model::hugging_face::PretrainedWeights;
use run_config::{AdapterDescription, Problem};
use serde::Serialize;

use super::Checkpoint;
use crate::checkpoint::{BaseModel, files};
use crate::error::checkpoint::{CheckpointError, Result};

/// Adapters that were checked against their model.
#[derive(Debug, Clone, Serialize)]
pub struct CheckedAdapters {
    /// The directory of their model.
    pub base_model: PathBuf,
    /// Whether they have a record of that model's files.
    pub is_recorded: bool,
    /// The inner dimension of the product of their two matrices.
    pub rank: usize,
    /// The factor that the product of the two is multiplied by.
    pub scale: f64,
}

impl Checkpoint {
    /// Whether it holds adapters of another model.
    pub fn has_adapters(&self) -> bool {
        let has = |name: &str| match &self.manifest {
            // What somebody has put beside it does not count.
            Some(manifest) => manifest.files.contains_key(name),
            None => self.directory.join(name).exists(),
        };
        has(files::ADAPTER_CONFIG) && !has(files::CONFIG)
    }

    /// Reads its `adapter_config.json`: the adapters' settings and the name of their model.
    pub(super) fn adapters(&self) -> Result<AdapterDescription> {
        let description = AdapterDescription::from_json(&self.json(files::ADAPTER_CONFIG)?);
        description.map_err(|Problem { path, message, .. }| {
            CheckpointError::mismatch(&self.directory, format!("{}: `{path}` {message}", files::ADAPTER_CONFIG))
        })
    }

    /// The record of the model that its adapters belong to; none in the adapters of another program.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupted`] if it is not what was written.
    pub fn base_record(&self) -> Result<Option<BaseModel>> {
        let Some(manifest) = self.manifest.as_ref().filter(|manifest| manifest.files.contains_key(files::BASE_MODEL))
        else {
            return Ok(None);
        };
        let base = BaseModel::from_bytes(&self.directory, &manifest.read(&self.directory, files::BASE_MODEL)?)?;
        Ok(Some(match &self.base_model {
            Some(directory) => base.moved_to(directory),
            None => base,
        }))
    }

    /// Opens the model that its adapters belong to.
    pub(super) fn base(&self) -> Result<Self> {
        let directory = match (self.base_record()?, &self.base_model) {
            (Some(recorded), _) => recorded.directory,
            (None, Some(directory)) => directory.clone(),
            (None, None) => PathBuf::from(self.adapters()?.base_model.unwrap_or_default()),
        };
        // An empty name is not the current folder.
        if directory.as_os_str().is_empty() || !directory.join(files::CONFIG).exists() {
            let (adapters, base) = (self.directory.clone(), directory);
            return Err(CheckpointError::BaseMoved { adapters, base });
        }
        Self::open(&directory)
    }

    /// Checks its adapters against their model, which is verified where they have a record of it; unless cancelled.
    ///
    /// # Errors
    /// [`CheckpointError::BaseMoved`] and [`CheckpointError::BaseChanged`] of the model; those of
    /// [`Checkpoint::pretrained_weights`] of the adapters.
    pub fn checked_adapters(&self, cancel: &CancelToken) -> Result<CheckedAdapters> {
        let base_record = self.base_record()?;
        if let Some(base_record) = &base_record {
            base_record.verify(&self.directory, cancel)?;
        }
        let (base_model, is_recorded) = (self.base()?.directory, base_record.is_some());
        let shape = self.model()?.shape;
        self.pretrained_adapters(&shape, cancel)?;
        let Some(lora) = shape.lora else {
            return Err(CheckpointError::mismatch(&self.directory, "it holds no adapters"));
        };
        Ok(CheckedAdapters { base_model, is_recorded, rank: lora.rank, scale: lora.scale() })
    }

    /// Refuses a model that its adapters were not trained beside, as far as they say which that was; unless cancelled.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBase`]
    pub fn check_base(&self, model: &Path, cancel: &CancelToken) -> Result<()> {
        let record = if let Some(record) = self.base_record()? {
            record
        } else {
            let base_path = PathBuf::from(self.adapters()?.base_model.unwrap_or_default());
            let is_other = base_path.canonicalize().ok() != model.canonicalize().ok();
            if !(base_path.is_absolute() && base_path.join(files::CONFIG).exists() && is_other) {
                return Ok(());
            }
            let base = Self::open(&base_path)?;
            base.pretrained_base(&base.model()?.shape, cancel)?.1
        };
        record.moved_to(model).verify(&self.directory, cancel).map_err(|error| match error {
            CheckpointError::BaseChanged { adapters, base, file } => {
                CheckpointError::OtherBase { adapters, base, file }
            }
            other => other,
        })
    }

    /// Opens adapters for training to start from, as [`Checkpoint::pretrained_weights`] opens a model.
    ///
    /// # Errors
    /// Those of [`Checkpoint::pretrained_weights`].
    pub fn pretrained_adapters(&self, shape: &ModelShape, cancel: &CancelToken) -> Result<PretrainedWeights> {
        Ok(self.pretrained(files::ADAPTERS, PretrainedWeights::open_adapters, shape, self.is_checkpoint(), cancel)?.0)
    }
}
