//! Saves a checkpoint as one directory, written atomically.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kernels::{Buffer, DType};
use model::{ModelShape, Precision, hugging_face};

use super::files::{self, pretty};
use super::list::{list, mark_latest};
use super::shared::{self, Leader};
use super::staging::{Create, StagingDirectory, create_file, create_folder, remove_leftovers};
use super::{BaseModel, TokenizerFiles, TrainerState, optimizer_file};
use crate::engine::{StateLayout, StateTensor};
use crate::error::checkpoint::{CheckpointError, Result, from_model_error, is_full};
use crate::ranks::Ranks;
use crate::units;

/// The contents of a checkpoint. The buffers are flat, laid out as `model::parameters` says.
#[derive(Debug)]
pub struct CheckpointContents<'a> {
    /// The model's sizes.
    pub shape: &'a ModelShape,
    /// The precision policy it is trained with.
    pub precision: Precision,
    /// The weights: F32, or BF16 with the low bits of the master weights in the optimizer's state.
    pub weights: &'a Buffer,
    /// The optimizer's state tensors.
    pub optimizer: &'a [StateTensor],
    /// The tokenizer the model was trained with.
    pub tokenizer: &'a TokenizerFiles,
    /// The trainer's state: everything that is not a tensor.
    pub state: &'a TrainerState,
    /// The model that the adapters of `shape` belong to; none without adapters.
    pub base: Option<&'a BaseModel>,
    /// The ranks that save it together: each writes its optimizer state, the first one also everything else.
    pub ranks: &'a Ranks,
}

/// Bytes reserved for headers and the small JSON files.
const SMALL_FILES_BYTES: u64 = 1 << 18;

/// The name of a step's directory: `step-00001000`.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Saves a checkpoint into the folder of checkpoints and makes it the latest. It is complete and durable when this
/// returns, and absent if this fails; a corrupted checkpoint of the same step is replaced. All ranks call it, and all fail
/// if one does.
pub fn save(directory: &Path, contents: &CheckpointContents) -> Result<PathBuf> {
    save_through(directory, contents, &create_file)
}

pub(super) fn save_through(directory: &Path, contents: &CheckpointContents, create: Create) -> Result<PathBuf> {
    if !contents.ranks.rank_info().is_first() {
        let write = |folder: &Path, staging: &mut StagingDirectory<'_>| write_optimizer(folder, contents, staging);
        shared::add_part(contents.ranks, create, write)?;
        return Ok(directory.join(step_name(contents.state.step)));
    }
    shared::lead(contents.ranks, |ranks| save_first(directory, contents, create, ranks))
}

/// Saves the part of the first rank: checks the free space, writes and commits the checkpoint, makes it the latest.
fn save_first(
    directory: &Path,
    contents: &CheckpointContents,
    create: Create,
    ranks: &mut Leader<'_>,
) -> Result<PathBuf> {
    let step = contents.state.step;
    let tensors = expected_bytes(contents.shape, contents.weights.dtype(), layouts(contents));
    let needed_bytes = tensors + contents.tokenizer.bytes() + SMALL_FILES_BYTES;
    let no_space = |free| CheckpointError::NoSpace { directory: directory.to_owned(), step, needed_bytes, free };
    let saved = prepare(directory).and_then(|()| {
        match free_bytes(directory) {
            Some(free) if free < needed_bytes => return Err(no_space(Some(free))),
            _ => {}
        }
        let place = write(directory, contents, create, ranks)?;
        mark_latest(&place)?;
        Ok(place)
    });
    match saved {
        Err(CheckpointError::Io { source, .. }) if is_full(&source) => Err(no_space(None)),
        Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::FileTooLarge => {
            Err(CheckpointError::FileSizeLimit { directory: directory.to_owned(), step, needed_bytes })
        }
        saved => saved,
    }
}

fn prepare(directory: &Path) -> Result<()> {
    create_folder(directory)?;
    // Pruning reports what cannot be removed.
    remove_leftovers(directory).map(drop)
}

fn write(directory: &Path, contents: &CheckpointContents, create: Create, ranks: &mut Leader<'_>) -> Result<PathBuf> {
    let CheckpointContents { shape, precision, weights, tokenizer, state, base, .. } = *contents;
    let name = step_name(state.step);
    let path = |file: &str| directory.join(&name).join(file);
    let (bos, end_of_text) = (Some(tokenizer.bos()), Some(tokenizer.end_of_text()));
    let mut staging = StagingDirectory::create(directory, &name, create)?;
    ranks.begin(staging.folder())?;
    match (&shape.lora, base) {
        (Some(lora), Some(base)) => {
            let config = hugging_face::adapter_config_json(lora, &base.directory);
            staging.bytes(files::ADAPTER_CONFIG, &pretty(&config))?;
            staging.bytes(files::BASE_MODEL, &base.to_bytes())?;
        }
        _ => staging.bytes(files::CONFIG, &pretty(&hugging_face::config_json(shape, precision, bos, end_of_text)))?,
    }
    staging.bytes(
        files::GENERATION_CONFIG,
        &pretty(&hugging_face::generation_config_json(bos, &tokenizer.stop_tokens(), tokenizer.generation_settings())),
    )?;
    for (file, content) in tokenizer.iter() {
        staging.bytes(file, content)?;
    }
    staging.bytes(files::STATE, &state.to_bytes())?;
    let write_weights = if shape.lora.is_some() { hugging_face::write_adapters } else { hugging_face::write_weights };
    let model = if shape.lora.is_some() { files::ADAPTERS } else { files::MODEL };
    staging.file(model, |writer: &mut dyn Write| {
        write_weights(writer, &path(model), shape, weights).map_err(|error| from_model_error(directory, error))
    })?;
    write_optimizer(directory, contents, &mut staging)?;
    ranks.collect(&mut staging)?;
    staging.commit(state.step)
}

/// Writes the optimizer's state that this rank keeps; returns the name of its file.
fn write_optimizer(directory: &Path, contents: &CheckpointContents, staging: &mut StagingDirectory) -> Result<String> {
    let name = optimizer_file::name(contents.ranks.rank_info());
    let path = directory.join(step_name(contents.state.step)).join(&name);
    staging.file(&name, |writer: &mut dyn Write| {
        optimizer_file::write(writer, &path, contents.shape, contents.optimizer)
            .map_err(|error| from_model_error(directory, error))
    })?;
    Ok(name)
}

fn layouts<'a>(contents: &CheckpointContents<'a>) -> impl Iterator<Item = &'a StateLayout> {
    contents.optimizer.iter().map(|tensor| &tensor.layout)
}

/// Bytes of the tensors of a checkpoint: the weights that train and the optimizer's state.
pub fn expected_bytes<'a>(shape: &ModelShape, weights: DType, optimizer: impl Iterator<Item = &'a StateLayout>) -> u64 {
    shape.trainable_parameter_count() * weights.size_in_bytes() as u64 + optimizer_file::payload_bytes(shape, optimizer)
}

/// Fails if the disk of a folder of checkpoints, which may not exist yet, has no room for one whose tensors take `bytes`;
/// returns a note if it has none for `count` of them, less those that are there.
pub fn check_room(directory: &Path, bytes: u64, count: u64) -> Result<Option<String>> {
    let existing = directory.ancestors().find(|folder| folder.exists());
    let Some(free) = existing.and_then(free_bytes) else { return Ok(None) };
    let needed_bytes = bytes + SMALL_FILES_BYTES;
    if free < needed_bytes {
        return Err(CheckpointError::NoSpaceToTrain { directory: directory.to_owned(), needed_bytes, free });
    }
    let missing_count = count.saturating_sub(list(directory).map_or(0, |all| all.len() as u64));
    let all = needed_bytes.saturating_mul(missing_count);
    Ok((free < all).then(|| {
        format!(
            "{} are free for the checkpoints in {}, and {missing_count} more of them take {}: free space, or keep \
             fewer (runtime.checkpoint.max_keep)",
            units::bytes(free),
            directory.display(),
            units::bytes(all)
        )
    }))
}

/// Bytes that this user may still write there; `None` if the system does not report them.
fn free_bytes(directory: &Path) -> Option<u64> {
    let system = rustix::fs::statvfs(directory).ok()?;
    Some(system.f_bavail * system.f_frsize)
}
