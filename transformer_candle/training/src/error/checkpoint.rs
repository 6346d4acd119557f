//! Errors of checkpoints.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use run_config::system_error::in_words;

use super::exit_code::ExitCode;
use crate::units::{bytes, grouped};

/// A corrupted checkpoint, and why it is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptedCheckpoint {
    /// The directory's name, `step-00001000`.
    pub name: String,
    /// The first thing found wrong with it.
    pub reason: String,
}

/// Everything that saving, checking or reading a checkpoint can fail with.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// One named checkpoint is not what was written.
    #[error(
        "checkpoint {directory} is corrupted: {reason}; take another one (`transformer-candle checkpoint list` shows them)"
    )]
    Corrupted {
        /// The checkpoint's directory.
        directory: PathBuf,
        /// The first thing found wrong with it.
        reason: String,
    },
    /// There are checkpoints, none of them intact.
    #[error("no intact checkpoint is left in {directory}:{}", listed(corrupted))]
    NoneIntact {
        /// The folder of checkpoints.
        directory: PathBuf,
        /// Each one with its reason.
        corrupted: Vec<CorruptedCheckpoint>,
    },
    /// Nothing has been saved there.
    #[error(
        "there is no checkpoint in {directory}: train first (a run without `--resume` starts at step 0), \
         or name a directory such as checkpoints/step-00001000"
    )]
    Absent {
        /// The folder that was looked through.
        directory: PathBuf,
    },
    /// A checkpoint was named that is not among those of its folder.
    #[error(
        "there is no checkpoint {directory}: it was removed, perhaps by its run, which keeps the newest ones and the best \
         (runtime.checkpoint.max_keep); the newest is {newest}"
    )]
    Removed {
        /// The checkpoint's directory.
        directory: PathBuf,
        /// The newest checkpoint in its folder.
        newest: PathBuf,
    },
    /// An intact checkpoint, but of another model, precision or format.
    #[error("checkpoint {directory} does not fit: {reason}")]
    Mismatch {
        /// The checkpoint's directory.
        directory: PathBuf,
        /// What differs.
        reason: String,
    },
    /// The model that adapters belong to is not where it was.
    #[error(
        "the adapters in {adapters} {}, or say where it is (`--base-model DIR`; for training `--override \
         model.init_from=DIR`)",
        describe_base(base)
    )]
    BaseMoved {
        /// The adapters' directory.
        adapters: PathBuf,
        /// Where the model was.
        base: PathBuf,
    },
    /// The model that adapters belong to is another one than they were trained beside.
    #[error(
        "{file} in {base} is not what the adapters in {adapters} were trained beside: restore that model, or say where it is \
         (`--base-model DIR`; for training `--override model.init_from=DIR`)"
    )]
    BaseChanged {
        /// The adapters' directory.
        adapters: PathBuf,
        /// The model's directory.
        base: PathBuf,
        /// The first of its files that differs.
        file: String,
    },
    /// Training would start from adapters of another model than its own.
    #[error(
        "the adapters in {adapters} (lora.init_from) were not trained beside the model in {base}, whose {file} is another \
         one: start from their own model, or train new adapters"
    )]
    OtherBase {
        /// The adapters' directory.
        adapters: PathBuf,
        /// The model's directory.
        base: PathBuf,
        /// The first of its files that differs.
        file: String,
    },
    /// A model of another program whose files are cut or hold numbers that are not finite.
    #[error("the model in {directory} is corrupted: {reason}; download it again")]
    CorruptedModel {
        /// The model's directory.
        directory: PathBuf,
        /// The first thing found wrong with it.
        reason: String,
    },
    /// A model of another program that the decoder does not run, or whose weights are not those of its `config.json`.
    #[error("the model in {directory} cannot be used: {reason}")]
    UnusableModel {
        /// The model's directory.
        directory: PathBuf,
        /// What it has, or lacks.
        reason: String,
    },
    /// The disk is full, or would be.
    #[error(
        "not enough room for the checkpoint of step {} in {directory}: it needs {}{}; \
         free some space or set runtime.checkpoint.directory to another disk (older checkpoints are untouched)",
        grouped(*step),
        bytes(*needed_bytes),
        free.map_or_else(String::new, |free| format!(", {} are free", bytes(free)))
    )]
    NoSpace {
        /// The folder of checkpoints.
        directory: PathBuf,
        /// The step that was to be saved.
        step: u64,
        /// Bytes the checkpoint takes.
        needed_bytes: u64,
        /// Bytes free when asked beforehand; none where the disk filled up meanwhile.
        free: Option<u64>,
    },
    /// A directory of somebody else's is where a run keeps the link to its newest or best checkpoint.
    #[error("{path} is a directory, where the run keeps a link to a checkpoint: move it elsewhere")]
    PointerInUse {
        /// The directory.
        path: PathBuf,
    },
    /// There is no room for a single checkpoint, before the first step.
    #[error(
        "no room for a checkpoint in {directory}: it takes {}, {} are free. Free space, train in a folder on another disk \
         (--run-dir, or ORCHESTRATE_RUNS_ROOT), or keep checkpoints elsewhere (runtime.checkpoint.directory)",
        bytes(*needed_bytes),
        bytes(*free)
    )]
    NoSpaceToTrain {
        /// The folder of checkpoints.
        directory: PathBuf,
        /// Bytes the checkpoint takes.
        needed_bytes: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The system limits the size of files.
    #[error(
        "the system's limit on the size of a file (`ulimit -f`) does not allow the checkpoint of step {} in {directory}, \
         which takes {}: raise the limit (older checkpoints are untouched)",
        grouped(*step),
        bytes(*needed_bytes)
    )]
    FileSizeLimit {
        /// The folder of checkpoints.
        directory: PathBuf,
        /// The step that was to be saved.
        step: u64,
        /// Bytes the checkpoint takes.
        needed_bytes: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {}", in_words(source))]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Reading was cancelled.
    #[error("stopped while reading a checkpoint")]
    Interrupted,
    /// Another rank could not write its part of a checkpoint; it says why.
    #[error("rank {rank}: {message}")]
    OnRank {
        /// The first such rank.
        rank: usize,
        /// What it says.
        message: String,
    },
    /// Another rank has ended.
    #[error("{0}")]
    RankLost(String),
    /// A buffer of the trainer could not be read or written.
    #[error("cannot move the checkpoint's tensors: {0}")]
    Kernel(#[from] kernels::Error),
}

/// The result type of checkpoint functions.
pub type Result<T> = std::result::Result<T, CheckpointError>;

impl CheckpointError {
    /// The exit code of a program that ends with this error.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Corrupted { .. }
            | Self::NoneIntact { .. }
            | Self::CorruptedModel { .. }
            | Self::BaseChanged { .. } => ExitCode::CheckpointCorrupted,
            Self::Absent { .. }
            | Self::Removed { .. }
            | Self::Mismatch { .. }
            | Self::UnusableModel { .. }
            | Self::BaseMoved { .. }
            | Self::NoSpaceToTrain { .. }
            | Self::PointerInUse { .. }
            | Self::OtherBase { .. } => ExitCode::WrongRequest,
            Self::NoSpace { .. }
            | Self::FileSizeLimit { .. }
            | Self::Io { .. }
            | Self::Interrupted
            | Self::OnRank { .. }
            | Self::RankLost(_)
            | Self::Kernel(_) => ExitCode::Unexpected,
        };
        code as u8
    }

    /// Whether a checkpoint could not be written because of the disk, which may recover.
    pub(crate) fn is_of_disk(&self) -> bool {
        matches!(self, Self::NoSpace { .. } | Self::FileSizeLimit { .. } | Self::Io { .. } | Self::OnRank { .. })
    }

    pub(crate) fn corrupted(directory: &Path, reason: impl Into<String>) -> Self {
        Self::Corrupted { directory: directory.to_owned(), reason: reason.into() }
    }

    pub(crate) fn mismatch(directory: &Path, reason: impl Into<String>) -> Self {
        Self::Mismatch { directory: directory.to_owned(), reason: reason.into() }
    }
}

/// Names the path in an I/O error: `.map_err(failed("read", path))`.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { action, path, source }
}

/// Converts an error of the tensor files to one of the checkpoint that they are in.
pub(crate) fn from_model_error(directory: &Path, error: model::Error) -> CheckpointError {
    match error {
        // What opening an irregular file fails with.
        model::Error::Io { path, source, .. }
            if matches!(source.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::IsADirectory) =>
        {
            CheckpointError::corrupted(directory, format!("{} cannot be read: {}", path.display(), in_words(&source)))
        }
        model::Error::Io { action, path, source } => CheckpointError::Io { action, path, source },
        model::Error::Kernel(error) => error.into(),
        model::Error::Malformed { .. } | model::Error::Index { .. } | model::Error::NotFiniteWeights { .. } => {
            CheckpointError::corrupted(directory, error.to_string())
        }
        other => CheckpointError::mismatch(directory, other.to_string()),
    }
}

impl CheckpointError {
    /// Converts the error of a checkpoint to that of a model of another program, which is no checkpoint.
    pub(crate) fn of_model(self) -> Self {
        match self {
            Self::Corrupted { directory, reason } => Self::CorruptedModel { directory, reason },
            Self::Mismatch { directory, reason } => Self::UnusableModel { directory, reason },
            other => other,
        }
    }
}

/// Whether the system said that the disk, or this user's share of it, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn listed(corrupted: &[CorruptedCheckpoint]) -> String {
    corrupted.iter().fold(String::new(), |mut text, CorruptedCheckpoint { name, reason }| {
        let _ = write!(text, " {name}: {reason};");
        text
    })
}

/// Says which model adapters belong to, and the first way out.
fn describe_base(base: &Path) -> String {
    if base.as_os_str().is_empty() {
        return "do not name their model (base_model_name_or_path in adapter_config.json): name it there".to_owned();
    }
    format!("belong to the model in {}, which is not there: put it back", base.display())
}
