//! Reads a checkpoint: the manifest once, and every other file verified against it.

mod adapters;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use model::hugging_face::{self, ByteObserver, PretrainedWeights};
use model::{LoraShape, ModelShape, Precision, Weights};
use serde_json::Value;

use super::list::{CheckpointEntry, pointed_checkpoint, removed};
use super::manifest::{FileHashes, FileRecord, Manifest, VerifiedFile};
use super::{BaseModel, TrainerState, files, optimizer_file, tokenizer_files};
use crate::engine::StateTensor;
use crate::error::checkpoint::{CheckpointError, Result, failed, from_model_error};

pub use adapters::CheckedAdapters;

/// Bytes of a JSON file of a model at most.
const LARGEST_JSON: u64 = 16 << 20;
/// Bytes per bf16 element.
const SMALLEST_PARAMETER_BYTES: u64 = 2;

/// Metadata of a model directory, without its weights.
#[derive(Debug, Clone)]
pub struct StoredModel {
    /// The model's sizes.
    pub shape: ModelShape,
    /// The type its weights are stored in.
    pub precision: Precision,
    /// The ids of the tokens that end a text, the first of which ends a document; empty if the model names none.
    pub stop_tokens: Vec<u32>,
}

/// A directory that is open for reading: a checkpoint, or any model in Hugging Face's format that the decoder runs. A
/// file that a manifest lists is refused if its size or SHA-256 differs.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    /// `None` in a model directory that is not a checkpoint.
    manifest: Option<Manifest>,
    /// The directory of the model that its adapters belong to, if it is not the recorded one.
    base_model: Option<PathBuf>,
}

impl Checkpoint {
    /// Opens a directory, or the one that `latest` or `best` points to, and reads its manifest, if there is one.
    ///
    /// # Errors
    /// [`CheckpointError::Absent`] where there is neither checkpoint nor model; [`CheckpointError::Removed`] for a
    /// checkpoint by its name that is not among those of its folder; [`CheckpointError::Corrupted`] if the
    /// manifest is not the one that was written, or that of another step than the directory's name says.
    pub fn open(directory: &Path) -> Result<Self> {
        let directory = &pointed_checkpoint(directory).unwrap_or_else(|| directory.to_owned());
        exists(directory)?;
        let has_manifest = fs::symlink_metadata(directory.join(files::MANIFEST)).is_ok();
        let manifest = has_manifest.then(|| Manifest::load(directory)).transpose()?;
        if let Some(manifest) = &manifest
            && let Some(entry) = CheckpointEntry::from_path(directory)
            && entry.step != manifest.step
        {
            let reason = format!("{} is that of step {}", files::MANIFEST, manifest.step);
            return Err(CheckpointError::corrupted(directory, reason));
        }
        Ok(Self { directory: directory.to_owned(), manifest, base_model: None })
    }

    /// The same checkpoint, with the directory of the model that its adapters belong to; None for the recorded one.
    #[must_use]
    pub fn beside(self, base_model: Option<&Path>) -> Self {
        Self { base_model: base_model.map(Path::to_owned), ..self }
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
    pub fn verify(&self, cancel: &CancelToken) -> Result<()> {
        self.manifest()?.verify_files(&self.directory, cancel)
    }

    /// Returns itself if every file is intact, as [`Checkpoint::verify`] says.
    ///
    /// # Errors
    /// Those of [`Checkpoint::verify`].
    pub fn verified(self, cancel: &CancelToken) -> Result<Self> {
        self.verify(cancel)?;
        Ok(self)
    }

    /// The names of files in its directory that were not written with it, sorted. Those that a model's directory may have,
    /// such as a chat template, are used as in any other one.
    pub fn foreign_files(&self) -> Result<Vec<String>> {
        let manifest = self.manifest()?;
        let entries = fs::read_dir(&self.directory).map_err(failed("read", &self.directory))?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut foreign: Vec<_> =
            names.filter(|name| name != files::MANIFEST && !manifest.files.contains_key(name)).collect();
        foreign.sort();
        Ok(foreign)
    }

    /// The trainer's state.
    pub fn state(&self) -> Result<TrainerState> {
        TrainerState::from_bytes(&self.directory, &self.manifest()?.read(&self.directory, files::STATE)?)
    }

    /// Verifies the files of its tokenizer and returns the path of its `tokenizer.json`.
    pub fn tokenizer(&self) -> Result<PathBuf> {
        let manifest = self.manifest()?;
        let names = tokenizer_files::NAMES.into_iter().filter(|name| manifest.files.contains_key(*name));
        for name in names.chain([files::TOKENIZER]) {
            manifest.read(&self.directory, name)?;
        }
        Ok(self.directory.join(files::TOKENIZER))
    }

    /// The directory of its tokenizer: its own, or that of the model that its adapters belong to.
    pub fn tokenizer_directory(&self) -> PathBuf {
        let is_listed = self.manifest.as_ref().is_some_and(|manifest| manifest.files.contains_key(files::TOKENIZER));
        let own = is_listed || self.directory.join(files::TOKENIZER).exists() || !self.has_adapters();
        let base = if own { None } else { self.base().ok() };
        base.map_or_else(|| self.directory.clone(), |base| base.directory)
    }

    /// Reads the model's sizes, element type and stop tokens. Adapters are described together with their model.
    pub fn model(&self) -> Result<StoredModel> {
        if !self.has_adapters() {
            return self.whole_model();
        }
        let StoredModel { shape, precision, mut stop_tokens } = self.base()?.whole_model()?;
        let lora = self.adapters()?.lora;
        // A run's adapters are used as they were trained, whatever type the model is stored in.
        let trained_in = self.state().ok().and_then(|state| state.precision());
        let own = self.end_tokens_of(files::GENERATION_CONFIG)?;
        if !own.is_empty() {
            stop_tokens = own;
        }
        let shape = shape.with_lora(LoraShape::from_config(&lora, Precision::Bf16));
        Ok(StoredModel { shape, precision: trained_in.unwrap_or(precision), stop_tokens })
    }

    fn whole_model(&self) -> Result<StoredModel> {
        let config = self.json(files::CONFIG)?;
        let shape = hugging_face::shape_from_config_json(&config).map_err(|error| self.refused(error))?;
        // The weights are looked at before anything of the size that the config describes is allocated.
        if self.is_checkpoint() {
            check_size(&self.directory, &shape)?;
        } else {
            PretrainedWeights::open(&self.directory, &shape).map_err(|error| self.refused(error))?;
        }
        let mut names = [&config["dtype"], &config["torch_dtype"]].into_iter();
        let dtype = names.find(|name| !name.is_null());
        let precision = if dtype.is_some_and(|dtype| dtype == "bfloat16") { Precision::Bf16 } else { Precision::Fp32 };
        let mut stop_tokens = self.end_tokens_of(files::GENERATION_CONFIG)?;
        if stop_tokens.is_empty() {
            stop_tokens = end_tokens(&config["eos_token_id"]);
        }
        Ok(StoredModel { shape, precision, stop_tokens })
    }

    /// The tokens that end a text according to a file, if it exists.
    fn end_tokens_of(&self, name: &str) -> Result<Vec<u32>> {
        let exists = self.directory.join(name).exists();
        Ok(if exists { end_tokens(&self.json(name)?["eos_token_id"]) } else { Vec::new() })
    }

    fn json(&self, name: &str) -> Result<Value> {
        let mut file = self.open_file(name, &CancelToken::new())?;
        if file.bytes() > LARGEST_JSON {
            let reason = format!("{name} has {} bytes, and describes a model in at most {LARGEST_JSON}", file.bytes());
            return Err(self.told(CheckpointError::corrupted(&self.directory, reason)));
        }
        let parsed = serde_json::from_reader(&mut file)
            .map_err(|error| self.told(CheckpointError::corrupted(&self.directory, format!("{name}: {error}"))));
        verified(file, parsed)
    }

    /// Reads the weights, unless cancelled; with adapters those of their model too, which is verified.
    /// On an error `weights` holds part of them.
    pub fn weights(&self, shape: &ModelShape, weights: &mut Weights, cancel: &CancelToken) -> Result<()> {
        if !self.has_adapters() {
            return self.whole_weights(shape, weights, None, cancel);
        }
        self.base_weights(shape, weights, cancel)?;
        if self.manifest.is_none() {
            let stored = PretrainedWeights::open_adapters(&self.directory, shape);
            let filled = stored.and_then(|stored| stored.read(weights, None, &|| cancel.is_cancelled(), None));
            return self.unless_cancelled(filled, cancel);
        }
        let mut file = self.open_file(files::ADAPTERS, cancel)?;
        let (bytes, path) = (file.bytes(), self.directory.join(files::ADAPTERS));
        let filled = hugging_face::read_adapters(&mut file, bytes, &path, shape, &mut weights.flat);
        verified(file, filled.map_err(|error| from_model_error(&self.directory, error)))
    }

    /// Reads the weights of the model that its adapters belong to, and compares that model with the record of it. Files
    /// without a manifest are hashed while they are read.
    fn base_weights(&self, shape: &ModelShape, weights: &mut Weights, cancel: &CancelToken) -> Result<()> {
        let (base, recorded) = (self.base()?, self.base_record()?);
        let Some(recorded) = recorded else {
            return base.whole_weights(shape, weights, None, cancel);
        };
        if base.is_checkpoint() {
            recorded.verify(&self.directory, cancel)?;
            return base.whole_weights(shape, weights, None, cancel);
        }
        recorded.verify_sizes(&self.directory)?;
        let mut hashes = FileHashes::default();
        match base.whole_weights(shape, weights, Some(&mut |path, bytes| hashes.update(path, bytes)), cancel) {
            Ok(()) => recorded.compare(&self.directory, &BaseModel::of_weights(&base.directory, hashes.records())?),
            Err(CheckpointError::Interrupted) => Err(CheckpointError::Interrupted),
            // Weights that another model has put there are the cause to report.
            Err(error) => recorded.verify(&self.directory, cancel).and(Err(error)),
        }
    }

    /// Reads the weights of a model without adapters; `observer` sees those of a directory without a manifest.
    fn whole_weights(
        &self,
        shape: &ModelShape,
        weights: &mut Weights,
        observer: Option<&mut ByteObserver<'_>>,
        cancel: &CancelToken,
    ) -> Result<()> {
        // A base in fp8 was compared with the adapters' record of it; its matrices are rounded as a whole.
        if self.manifest.is_none() || shape.has_fp8_base() {
            let stored = PretrainedWeights::open(&self.directory, shape);
            let filled = stored.and_then(|stored| stored.read(weights, None, &|| cancel.is_cancelled(), observer));
            return self.unless_cancelled(filled, cancel);
        }
        let mut file = self.open_file(files::MODEL, cancel)?;
        let (bytes, path) = (file.bytes(), self.directory.join(files::MODEL));
        let filled = hugging_face::read_weights(&mut file, bytes, &path, shape, &mut weights.flat);
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
        Ok(self.pretrained(files::MODEL, PretrainedWeights::open, shape, self.is_checkpoint(), cancel)?.0)
    }

    /// Opens the weights for adapters to train beside, as [`Checkpoint::pretrained_weights`] does, with a record of them.
    ///
    /// # Errors
    /// Those of [`Checkpoint::pretrained_weights`].
    pub fn pretrained_base(&self, shape: &ModelShape, cancel: &CancelToken) -> Result<(PretrainedWeights, BaseModel)> {
        let (weights, files) = self.pretrained(files::MODEL, PretrainedWeights::open, shape, true, cancel)?;
        Ok((weights, BaseModel::of_weights(&self.directory, files)?))
    }

    /// Opens and checks the weights; if they `are_hashed`, with records of their files, to compare with a manifest.
    fn pretrained(
        &self,
        name: &str,
        open: impl FnOnce(&Path, &ModelShape) -> model::Result<PretrainedWeights>,
        shape: &ModelShape,
        are_hashed: bool,
        cancel: &CancelToken,
    ) -> Result<(PretrainedWeights, BTreeMap<String, FileRecord>)> {
        let mut hashes = FileHashes::default();
        let mut observe = |path: &Path, bytes: &[u8]| hashes.update(path, bytes);
        let observer = are_hashed.then_some(&mut observe as &mut ByteObserver<'_>);
        let opened = open(&self.directory, shape).and_then(|stored| {
            stored.check_numbers(&|| cancel.is_cancelled(), observer)?;
            Ok(stored)
        });
        if cancel.is_cancelled() {
            return Err(CheckpointError::Interrupted);
        }
        let records = hashes.records();
        // Corruption is the cause to report; weights that were refused have not been read to their end.
        match (&self.manifest, &opened) {
            (Some(manifest), Ok(_)) if manifest.files.get(name) == records.get(name) => {}
            (Some(manifest), _) => manifest.open(&self.directory, name, cancel)?.finish()?,
            (None, _) => {}
        }
        Ok((opened.map_err(|error| self.refused(error))?, records))
    }

    /// Returns the model's `config.json` with every key, as training would save it. Without a manifest there are no
    /// hashes: the weights are then checked as training from them would do, with `read_weights` every number.
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

    /// Words the error for a checkpoint or for a model of another program.
    fn told(&self, error: CheckpointError) -> CheckpointError {
        if self.is_checkpoint() { error } else { error.of_model() }
    }

    /// Reads the optimizer's state of this rank, unless cancelled. On an error the buffers hold part of it.
    pub fn optimizer(&self, shape: &ModelShape, state: &mut [StateTensor], cancel: &CancelToken) -> Result<()> {
        let manifest = self.manifest()?;
        let mut state = optimizer_file::Reader::new(shape, state);
        let names = optimizer_file::names(manifest.files.keys());
        // Where there is no file, opening it reports that it is missing.
        for name in if names.is_empty() { vec![files::OPTIMIZER] } else { names } {
            let mut file = manifest.open(&self.directory, name, cancel)?;
            let bytes = file.bytes();
            let filled = state.read(&mut file, bytes, &self.directory.join(name));
            verified(file, filled.map_err(|error| from_model_error(&self.directory, error)))?;
        }
        let complete = state.finish(&self.directory.join(files::OPTIMIZER));
        complete.map_err(|error| from_model_error(&self.directory, error))
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
    let expected = shape.parameter_count();
    match fs::metadata(directory.join(files::MODEL)) {
        Ok(file) if file.is_file() && file.len() / SMALLEST_PARAMETER_BYTES < expected => {
            Err(CheckpointError::mismatch(
                directory,
                format!(
                    "{} describes {expected} parameters, and {} has only {} bytes",
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

/// The ids in the `eos_token_id` of a `config.json` or `generation_config.json`, of which there may be several.
pub(super) fn end_tokens(ids: &Value) -> Vec<u32> {
    let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
    ids.iter().filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}

/// Verifies the file even if parsing failed: corruption is the cause to report.
fn verified<T>(file: VerifiedFile, read: Result<T>) -> Result<T> {
    file.finish()?;
    read
}

fn exists(directory: &Path) -> Result<()> {
    for name in [files::CONFIG, files::MANIFEST, files::ADAPTER_CONFIG] {
        let path = directory.join(name);
        // A link that leads nowhere is a file that cannot be read.
        match fs::symlink_metadata(&path) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed("read", &path)(error)),
        }
    }
    Err(removed(directory).unwrap_or_else(|| CheckpointError::Absent { directory: directory.to_owned() }))
}
