//! Reads a checkpoint: the manifest once, and every other file verified against it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use kernels::Buffer;
use model::hugging_face::{self, PretrainedWeights};
use model::{ModelShape, Precision};
use serde_json::Value;

use super::manifest::{Manifest, VerifiedFile};
use super::{TrainerState, files, optimizer_file};
use crate::engine::StateTensor;
use crate::error::checkpoint::{CheckpointError, Result, failed, from_model_error};

/// Bytes per bf16 element.
const SMALLEST_PARAMETER_BYTES: u64 = 2;

/// Metadata of a model directory, without its weights.
#[derive(Debug, Clone)]
pub struct StoredModel {
    /// The model's sizes.
    pub shape: ModelShape,
    /// The type its weights are stored in.
    pub precision: Precision,
    /// The tokens that end a text, the first of them a document, as far as the model names any.
    pub stop_tokens: Vec<u32>,
}

/// A directory that is open for reading: a checkpoint, or any model in Hugging Face's format that the decoder runs. A
/// file that a manifest lists is refused if its size or SHA-256 differs.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    /// `None` in a model directory that is not a checkpoint.
    manifest: Option<Manifest>,
}

impl Checkpoint {
    /// Reads the manifest, if there is one.
    ///
    /// # Errors
    /// [`CheckpointError::Absent`] where there is neither checkpoint nor model; [`CheckpointError::Corrupted`] if the manifest is not the
    /// one that was written.
    pub fn open(directory: &Path) -> Result<Self> {
        exists(directory)?;
        let has_manifest = directory.join(files::MANIFEST).exists();
        let manifest = has_manifest.then(|| Manifest::load(directory)).transpose()?;
        Ok(Self { directory: directory.to_owned(), manifest })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether it has a manifest, as a model of another program does not.
    pub fn is_checkpoint(&self) -> bool {
        self.manifest.is_some()
    }

    /// The manifest.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupted`] where there is none: training cannot be resumed from this directory.
    pub fn manifest(&self) -> Result<&Manifest> {
        self.manifest
            .as_ref()
            .ok_or_else(|| CheckpointError::corrupted(&self.directory, format!("{} is missing", files::MANIFEST)))
    }

    /// Verifies every file, unless cancelled.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupted`] names the first corrupted file.
    pub fn verified(self, cancel: &CancelToken) -> Result<Self> {
        self.manifest()?.verify_files(&self.directory, cancel)?;
        Ok(self)
    }

    /// The trainer's state.
    pub fn state(&self) -> Result<TrainerState> {
        TrainerState::from_bytes(&self.directory, &self.manifest()?.read(&self.directory, files::STATE)?)
    }

    /// The verified file of its tokenizer.
    pub fn tokenizer(&self) -> Result<PathBuf> {
        self.manifest()?.read(&self.directory, files::TOKENIZER)?;
        Ok(self.directory.join(files::TOKENIZER))
    }

    /// Sizes and types of the model, and where its texts end.
    pub fn model(&self) -> Result<StoredModel> {
        let config = self.json(files::CONFIG)?;
        let shape = hugging_face::shape_from_config_json(&config).map_err(|error| self.refused(error))?;
        // The weights are looked at before anything of the size that the config describes is allocated.
        if self.is_checkpoint() {
            check_size(&self.directory, &shape)?;
        } else {
            PretrainedWeights::open(&self.directory, &shape).map_err(|error| self.refused(error))?;
        }
        let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"));
        let precision = if dtype.is_some_and(|dtype| dtype == "bfloat16") { Precision::Bf16 } else { Precision::Fp32 };
        let mut stop_tokens = Vec::new();
        if self.directory.join(files::GENERATION_CONFIG).exists() {
            stop_tokens = end_tokens(&self.json(files::GENERATION_CONFIG)?);
        }
        if stop_tokens.is_empty() {
            stop_tokens = end_tokens(&config);
        }
        Ok(StoredModel { shape, precision, stop_tokens })
    }

    fn json(&self, name: &str) -> Result<Value> {
        let mut file = self.open_file(name, &CancelToken::new())?;
        let parsed = serde_json::from_reader(&mut file)
            .map_err(|error| self.told(CheckpointError::corrupted(&self.directory, format!("{name}: {error}"))));
        verified(file, parsed)
    }

    /// Reads the weights into a flat buffer, unless cancelled. On an error the buffer holds part of them.
    pub fn weights(&self, shape: &ModelShape, weights: &mut Buffer, cancel: &CancelToken) -> Result<()> {
        if self.manifest.is_none() {
            let stored = PretrainedWeights::open(&self.directory, shape);
            let filled = stored.and_then(|stored| stored.read(weights, None, &|| cancel.is_cancelled()));
            return self.unless_cancelled(filled, cancel);
        }
        let mut file = self.open_file(files::MODEL, cancel)?;
        let (bytes, path) = (file.bytes(), self.directory.join(files::MODEL));
        let filled = hugging_face::read_weights(&mut file, bytes, &path, shape, weights);
        verified(file, filled.map_err(|error| self.refused(error)))
    }

    /// Opens the weights for training to start from. Every number is read once, so that nothing has been allocated when
    /// the weights are refused; unless cancelled.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupted`] or [`CheckpointError::CorruptedModel`] for files that are cut, differ from the
    /// manifest or hold numbers that are not finite; [`CheckpointError::Mismatch`] or
    /// [`CheckpointError::UnusableModel`] if they are another model's.
    pub fn pretrained_weights(&self, shape: &ModelShape, cancel: &CancelToken) -> Result<PretrainedWeights> {
        if let Some(manifest) = &self.manifest {
            let mut file = manifest.open(&self.directory, files::MODEL, cancel)?;
            let copied = io::copy(&mut file, &mut io::sink());
            verified(file, copied.map_err(failed("read", &self.directory.join(files::MODEL))))?;
        }
        let stored = PretrainedWeights::open(&self.directory, shape).map_err(|error| self.refused(error))?;
        self.unless_cancelled(stored.check_finite(&|| cancel.is_cancelled()), cancel)?;
        Ok(stored)
    }

    /// The model's `config.json` with every key, as training would save it. Of a model that is not a checkpoint, and so
    /// has no hashes, the weights are checked as training from them would do: with `read_weights` every number.
    ///
    /// # Errors
    /// As [`Self::pretrained_weights`]; [`CheckpointError::UnusableModel`] if the decoder does not run the model.
    pub fn checked_config(&self, read_weights: bool, cancel: &CancelToken) -> Result<Value> {
        if let Some(manifest) = &self.manifest {
            manifest.open(&self.directory, files::MODEL, cancel)?;
        }
        let StoredModel { shape, precision, .. } = self.model()?;
        if read_weights && !self.is_checkpoint() {
            self.pretrained_weights(&shape, cancel)?;
        }
        Ok(hugging_face::config_json(&shape, precision, None, None))
    }

    fn unless_cancelled(&self, read: model::Result<()>, cancel: &CancelToken) -> Result<()> {
        if cancel.is_cancelled() {
            return Err(CheckpointError::Interrupted);
        }
        read.map_err(|error| self.refused(error))
    }

    fn refused(&self, error: model::Error) -> CheckpointError {
        self.told(from_model_error(&self.directory, error))
    }

    /// The error, told of a checkpoint or of a model.
    fn told(&self, error: CheckpointError) -> CheckpointError {
        if self.is_checkpoint() { error } else { error.of_model() }
    }

    /// Reads the optimizer's state, unless cancelled. On an error the buffers hold part of it.
    pub fn optimizer(&self, shape: &ModelShape, state: &mut [StateTensor], cancel: &CancelToken) -> Result<()> {
        let mut file = self.manifest()?.open(&self.directory, files::OPTIMIZER, cancel)?;
        let (bytes, path) = (file.bytes(), self.directory.join(files::OPTIMIZER));
        let filled = optimizer_file::read(&mut file, bytes, &path, shape, state);
        verified(file, filled.map_err(|error| from_model_error(&self.directory, error)))
    }

    fn open_file(&self, name: &str, cancel: &CancelToken) -> Result<VerifiedFile> {
        match &self.manifest {
            Some(manifest) => manifest.open(&self.directory, name, cancel),
            None => VerifiedFile::open(&self.directory, name, None, cancel),
        }
    }
}

/// Refuses a config with more parameters than its weights file can hold, before allocating.
fn check_size(directory: &Path, shape: &ModelShape) -> Result<()> {
    let described = shape.parameter_count();
    match fs::metadata(directory.join(files::MODEL)) {
        Ok(file) if file.is_file() && file.len() / SMALLEST_PARAMETER_BYTES < described => {
            Err(CheckpointError::mismatch(
                directory,
                format!(
                    "{} describes {described} parameters, and {} has only {} bytes",
                    files::CONFIG,
                    files::MODEL,
                    file.len()
                ),
            ))
        }
        // Other errors of the file are reported when it is read.
        _ => Ok(()),
    }
}

/// The `eos_token_id` of a `config.json` or `generation_config.json`, of which there may be several.
fn end_tokens(config: &Value) -> Vec<u32> {
    let ids = &config["eos_token_id"];
    let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
    ids.iter().filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}

/// Verifies the file even if parsing failed: corruption is the cause to report.
fn verified<T>(file: VerifiedFile, read: Result<T>) -> Result<T> {
    file.finish()?;
    read
}

fn exists(directory: &Path) -> Result<()> {
    for name in [files::CONFIG, files::MANIFEST] {
        let path = directory.join(name);
        if path.try_exists().map_err(failed("read", &path))? {
            return Ok(());
        }
    }
    Err(CheckpointError::Absent { directory: directory.to_owned() })
}
