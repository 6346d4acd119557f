//! The model that a command works on: a run's newest checkpoint, or a model by its folder.

use std::path::{Path, PathBuf};

use clap::Args;
use dataset::CancelToken;
use run_config::{ADAPTER_CONFIG, check_experiment_name, checkpoint_directory, model_file_problem};

use super::named_run::{NamedRun, known, runs_root};
use crate::checkpoint::{self, Checkpoint};
use crate::{Result, TrainerError};

/// A trained model.
#[derive(Debug, Clone, Args)]
pub struct ModelSource {
    /// Which one.
    #[command(flatten)]
    pub name: ModelName,
    /// The folder of the model that a checkpoint of adapters belongs to. [default: where it was in training]
    #[arg(long, value_name = "DIR")]
    pub base_model: Option<PathBuf>,
}

/// A trained model, named one way or the other.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub struct ModelName {
    /// A run: its name, its directory, a checkpoint, any other model's directory, or a config file. [default: the newest
    /// run]
    #[arg(value_name = "RUN")]
    pub run: Option<PathBuf>,
    /// A checkpoint, a folder of checkpoints, a run's folder, or any Llama model or adapters in Hugging Face's format.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// The newest intact checkpoint of an experiment.
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
}

impl ModelSource {
    /// Names the model in a directory or in a folder of checkpoints.
    pub fn of_directory(directory: PathBuf) -> Self {
        Self { name: ModelName { run: None, checkpoint: Some(directory), experiment: None }, base_model: None }
    }

    /// Opens the model and reads it with `read`, unless `cancel` says to stop. Where a live run removes the checkpoint
    /// meanwhile, the one that the name then stands for is read instead.
    ///
    /// # Errors
    /// [`CheckpointError::Removed`](checkpoint::CheckpointError::Removed) where one checkpoint was named.
    pub fn read<T>(&self, cancel: &CancelToken, mut read: impl FnMut(&Checkpoint) -> Result<T>) -> Result<T> {
        let source = self.named()?;
        read_present(
            cancel,
            || source.directory(cancel),
            |directory| read(&Checkpoint::open(directory)?.beside(self.base_model.as_deref())),
        )
    }

    /// Returns the model's directory, unless `cancel` says to stop. Warns of corrupted checkpoints that it skips.
    pub fn directory(&self, cancel: &CancelToken) -> Result<PathBuf> {
        let folder = self.folder()?;
        if let Some(problem) = model_file_problem(&folder) {
            return Err(TrainerError::Request(problem));
        }
        if let Some(error) = checkpoint::removed(&folder) {
            return Err(error.into());
        }
        let marks = ["config.json", checkpoint::MANIFEST_FILE_NAME, ADAPTER_CONFIG];
        if marks.iter().any(|name| folder.join(name).exists()) {
            return Ok(folder);
        }
        let newest = checkpoint::newest_intact(&checkpoints_in(&folder), cancel)?;
        for corrupted in &newest.corrupted {
            tracing::warn!("checkpoint {} is corrupted and was skipped: {}", corrupted.name, corrupted.reason);
        }
        Ok(newest.checkpoint.directory().to_owned())
    }

    /// Returns the same source; where nothing is named, that of the newest run, whichever run is the newest later.
    fn named(&self) -> Result<Self> {
        let mut source = self.clone();
        if let ModelName { run: run @ None, checkpoint: None, experiment: None } = &mut source.name {
            *run = Some(NamedRun::find_or_newest(None)?.model_folder()?);
        }
        Ok(source)
    }

    fn folder(&self) -> Result<PathBuf> {
        match (&self.name.checkpoint, &self.name.experiment) {
            (Some(directory), _) => Ok(checkpoint::pointed_checkpoint(directory).unwrap_or_else(|| directory.clone())),
            (None, Some(name)) => experiment_folder(name),
            (None, None) => NamedRun::find_or_newest(self.name.run.as_deref())?.model_folder(),
        }
    }
}

/// Reads with `read` the checkpoint that `find` finds, and the next one where it is removed meanwhile, as a live run
/// does with old ones; unless `cancel` says to stop.
pub(super) fn read_present<T>(
    cancel: &CancelToken,
    find: impl Fn() -> Result<PathBuf>,
    mut read: impl FnMut(&Path) -> Result<T>,
) -> Result<T> {
    loop {
        let directory = find()?;
        match read(&directory) {
            Err(_) if checkpoint::is_removed(&directory) && !cancel.is_cancelled() => {
                tracing::info!("{} was removed while it was read", directory.display());
            }
            result => return result,
        }
    }
}

/// Returns an experiment's run directory: `ORCHESTRATE_RUNS_ROOT`, or `runs` in the current folder, and its name.
pub fn experiment_folder(name: &str) -> Result<PathBuf> {
    // A name that is a model's file was meant as one.
    let refused = |message| TrainerError::Request(model_file_problem(Path::new(name)).unwrap_or(message));
    check_experiment_name(name).map_err(|problem| refused(problem.to_string()))?;
    let root = runs_root();
    let folder = root.join(name);
    if folder.is_dir() {
        return Ok(folder);
    }
    Err(refused(format!("there is no experiment {name:?} in {}; {}", root.display(), known(&root))))
}

/// Returns the folder of checkpoints of a run directory, or `folder` itself if it is one already.
pub fn checkpoints_in(folder: &Path) -> PathBuf {
    let usual = folder.join("checkpoints");
    match checkpoint_directory(folder) {
        Some(configured) if configured.is_dir() => configured,
        _ if usual.is_dir() => usual,
        _ => folder.to_owned(),
    }
}
