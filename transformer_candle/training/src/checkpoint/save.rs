//! Saving: everything of a run in one directory, all of it or nothing.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kernels::Buffer;
use model::{ModelShape, Precision, hugging_face};

use super::aside::{Aside, Create, create_file, remove_leftovers, replace_text};
use super::error::{CheckpointError, Result, failed, is_full, of_model};
use super::list::LATEST;
use super::optimizer_file::{self, OptimizerBuffers};
use super::{
    CONFIG_FILE, GENERATION_CONFIG_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TokenizerFiles, TrainerState, pretty,
};

/// What a checkpoint is made of. The buffers are flat, laid out as `model::parameters` says.
#[derive(Debug)]
pub struct CheckpointContents<'a> {
    /// The model's sizes.
    pub shape: &'a ModelShape,
    /// The policy it is trained with.
    pub precision: Precision,
    /// F32, or BF16 beside a remainder.
    pub weights: &'a Buffer,
    /// The low halves (I16) of the f32 master weights, with BF16 weights.
    pub remainder: Option<&'a Buffer>,
    /// AdamW's first moments, F32.
    pub first_moment: &'a Buffer,
    /// AdamW's second moments, F32.
    pub second_moment: &'a Buffer,
    /// The tokenizer the model was trained with.
    pub tokenizer: &'a TokenizerFiles,
    /// Everything else.
    pub state: &'a TrainerState,
}

/// Room for headers and the small JSON files.
const SMALL_FILES_BYTES: u64 = 1 << 18;

/// The name of a step's directory: `step-00001000`.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Saves a checkpoint into the folder of checkpoints and makes it the latest. It is there whole when this returns,
/// durable, and not at all when this fails; a damaged checkpoint of the same step is replaced.
pub fn save(directory: &Path, contents: &CheckpointContents) -> Result<PathBuf> {
    save_through(directory, contents, &create_file)
}

pub(super) fn save_through(directory: &Path, contents: &CheckpointContents, create: Create) -> Result<PathBuf> {
    let step = contents.state.step;
    let needed = expected_bytes(contents);
    let no_space = |free| CheckpointError::NoSpace { directory: directory.to_owned(), step, needed, free };
    let saved = prepare(directory).and_then(|()| {
        match free_bytes(directory) {
            Some(free) if free < needed => return Err(no_space(Some(free))),
            _ => {}
        }
        let place = write(directory, contents, create)?;
        replace_text(directory, LATEST, &format!("{}\n", step_name(step)))?;
        Ok(place)
    });
    match saved {
        Err(CheckpointError::Io { source, .. }) if is_full(&source) => Err(no_space(None)),
        Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::FileTooLarge => {
            Err(CheckpointError::FileSizeLimit { directory: directory.to_owned(), step, needed })
        }
        saved => saved,
    }
}

fn prepare(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(failed("create", directory))?;
    // What cannot be removed is told of when old checkpoints are.
    remove_leftovers(directory).map(drop)
}

fn write(directory: &Path, contents: &CheckpointContents, create: Create) -> Result<PathBuf> {
    let CheckpointContents { shape, precision, weights, tokenizer, state, .. } = *contents;
    let name = step_name(state.step);
    let path = |file: &str| directory.join(&name).join(file);
    let end_of_text = Some(tokenizer.end_of_text());
    let mut aside = Aside::begin(directory, &name, create)?;
    aside.bytes(CONFIG_FILE, &pretty(&hugging_face::config_json(shape, precision, end_of_text, end_of_text)))?;
    aside.bytes(GENERATION_CONFIG_FILE, &pretty(&hugging_face::generation_config_json(end_of_text, end_of_text)))?;
    for (file, content) in tokenizer.iter() {
        aside.bytes(file, content)?;
    }
    aside.bytes(STATE_FILE, &state.to_bytes())?;
    aside.file(MODEL_FILE, |writer: &mut dyn Write| {
        hugging_face::write_weights(writer, &path(MODEL_FILE), shape, weights)
            .map_err(|error| of_model(directory, error))
    })?;
    aside.file(OPTIMIZER_FILE, |writer: &mut dyn Write| {
        optimizer_file::write(writer, &path(OPTIMIZER_FILE), shape, &optimizer_buffers(contents))
            .map_err(|error| of_model(directory, error))
    })?;
    aside.commit(state.step)
}

fn optimizer_buffers<'a>(contents: &CheckpointContents<'a>) -> OptimizerBuffers<'a> {
    let CheckpointContents { first_moment, second_moment, remainder, .. } = *contents;
    OptimizerBuffers { first_moment, second_moment, remainder }
}

fn expected_bytes(contents: &CheckpointContents) -> u64 {
    contents.shape.parameter_count() * contents.weights.dtype().size_in_bytes() as u64
        + optimizer_file::payload_bytes(contents.shape, &optimizer_buffers(contents))
        + contents.tokenizer.bytes()
        + SMALL_FILES_BYTES
}

/// What this user may still write there; none where the system does not say.
fn free_bytes(directory: &Path) -> Option<u64> {
    let system = rustix::fs::statvfs(directory).ok()?;
    Some(system.f_bavail * system.f_frsize)
}
