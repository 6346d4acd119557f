//! Reading a checkpoint back, every byte proven against its manifest.

use std::fs;
use std::path::Path;

use dataset::CancelToken;
use kernels::Buffer;
use model::{ModelShape, Precision, hugging_face};
use serde_json::Value;

use super::error::{CheckpointError, Result, failed, of_model};
use super::manifest::{self, Manifest, VerifiedFile};
use super::optimizer_file::{self, OptimizerBuffers};
use super::{CONFIG_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TrainerState};

/// Of bf16.
const SMALLEST_PARAMETER_BYTES: u64 = 2;

/// What a model directory holds, before its weights are read.
#[derive(Debug, Clone)]
pub struct StoredModel {
    /// The model's sizes.
    pub shape: ModelShape,
    /// The type its weights are stored in.
    pub precision: Precision,
    /// The token that ends a text, if the model names one.
    pub end_of_text: Option<u32>,
}

/// Proves size and SHA-256 of every file of a checkpoint, unless `cancel` says to stop.
pub fn verify(checkpoint: &Path, cancel: &CancelToken) -> Result<Manifest> {
    exists(checkpoint)?;
    let manifest = Manifest::load(checkpoint)?;
    manifest.verify_files(checkpoint, cancel)?;
    Ok(manifest)
}

/// The trainer's state of a checkpoint.
pub fn load_state(checkpoint: &Path) -> Result<TrainerState> {
    exists(checkpoint)?;
    let bytes = Manifest::load(checkpoint)?.read(checkpoint, STATE_FILE)?;
    TrainerState::from_bytes(checkpoint, &bytes)
}

/// Fills the trainer's flat buffers with weights, moments and (bf16) remainders of a checkpoint. On an error they
/// hold part of it. `cancel` ends reading.
pub fn restore(
    checkpoint: &Path,
    shape: &ModelShape,
    weights: &mut Buffer,
    remainder: Option<&mut Buffer>,
    first_moment: &mut Buffer,
    second_moment: &mut Buffer,
    cancel: &CancelToken,
) -> Result<()> {
    load_weights(checkpoint, shape, weights, cancel)?;
    let mut file = Manifest::load(checkpoint)?.open(checkpoint, OPTIMIZER_FILE, cancel)?;
    let bytes = file.bytes();
    let buffers = OptimizerBuffers { first_moment, second_moment, remainder: remainder.map(|remainder| &*remainder) };
    let filled = optimizer_file::read(&mut file, bytes, &checkpoint.join(OPTIMIZER_FILE), shape, &buffers);
    proven(file, filled.map_err(|error| of_model(checkpoint, error)))
}

/// Sizes and types of a model directory: a checkpoint, or any Llama model in one safetensors file.
pub fn stored_model(directory: &Path) -> Result<StoredModel> {
    exists(directory)?;
    let mut file = open(directory, CONFIG_FILE, &CancelToken::new())?;
    let parsed = serde_json::from_reader(&mut file)
        .map_err(|error| CheckpointError::damaged(directory, format!("{CONFIG_FILE}: {error}")));
    let config: Value = proven(file, parsed)?;
    let shape = hugging_face::shape_from_config_json(&config).map_err(|error| of_model(directory, error))?;
    check_size(directory, &shape)?;
    let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"));
    let precision = if dtype.is_some_and(|dtype| dtype == "bfloat16") { Precision::Bf16 } else { Precision::Fp32 };
    let end_of_text = config.get("eos_token_id").and_then(Value::as_u64).and_then(|id| id.try_into().ok());
    Ok(StoredModel { shape, precision, end_of_text })
}

/// Refuses a config that describes more parameters than the file beside it can hold, before anything is made for them.
fn check_size(directory: &Path, shape: &ModelShape) -> Result<()> {
    let described = shape.parameter_count();
    match fs::metadata(directory.join(MODEL_FILE)) {
        Ok(file) if file.is_file() && file.len() / SMALLEST_PARAMETER_BYTES < described => {
            Err(CheckpointError::mismatch(
                directory,
                format!(
                    "{CONFIG_FILE} describes {described} parameters, and {MODEL_FILE} has only {} bytes",
                    file.len()
                ),
            ))
        }
        // What is wrong with the file is told when it is read.
        _ => Ok(()),
    }
}

/// Fills a flat buffer with a model directory's weights alone. `cancel` ends reading.
pub fn load_weights(directory: &Path, shape: &ModelShape, weights: &mut Buffer, cancel: &CancelToken) -> Result<()> {
    exists(directory)?;
    let mut file = open(directory, MODEL_FILE, cancel)?;
    let bytes = file.bytes();
    let filled = hugging_face::read_weights(&mut file, bytes, &directory.join(MODEL_FILE), shape, weights);
    proven(file, filled.map_err(|error| of_model(directory, error)))
}

/// Opens a file of a model directory; one with a manifest is held to it.
fn open(directory: &Path, name: &str, cancel: &CancelToken) -> Result<VerifiedFile> {
    if directory.join(manifest::FILE_NAME).exists() {
        return Manifest::load(directory)?.open(directory, name, cancel);
    }
    VerifiedFile::open(directory, name, None, cancel)
}

/// A file that is not what was written is damaged, whatever else its content led to.
fn proven<T>(file: VerifiedFile, read: Result<T>) -> Result<T> {
    file.finish()?;
    read
}

fn exists(directory: &Path) -> Result<()> {
    for name in [CONFIG_FILE, manifest::FILE_NAME] {
        let path = directory.join(name);
        if path.try_exists().map_err(failed("read", &path))? {
            return Ok(());
        }
    }
    Err(CheckpointError::Absent { directory: directory.to_owned() })
}
