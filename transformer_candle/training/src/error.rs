//! Everything that can stop a run, with the way out, and the exit code each cause has in the command's contract.

pub(crate) mod checkpoint;
mod exit_code;
pub(crate) mod shortage;

use std::{io, path::PathBuf};

use dataset::DataError;
use run_config::system_error::in_words;

pub use self::{
    checkpoint::{CheckpointError, CorruptedCheckpoint},
    exit_code::ExitCode,
    shortage::{Budget, MemoryRequirement, Shortage},
};
use crate::{
    config_fingerprint::Change,
    stop_reason::StopReason,
    units::{bytes, grouped},
};

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, TrainerError>;

/// Why a run cannot start or continue, or was stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// What was asked for cannot be done as asked: a sentence that says what, where and the way out.
    #[error("{0}")]
    Request(String),

    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] run_config::ConfigError),

    /// Another trainer lives in the run directory.
    #[error("{} is in use by process {pid} on {host}: stop that trainer, or give this one its own run directory", directory.display())]
    Locked {
        /// The run directory.
        directory: PathBuf,
        /// The owner's process id.
        pid: u32,
        /// The owner's host name.
        host: String,
    },

    /// Settings that must not change on resume differ from the checkpoint's.
    #[error("{} was trained with other settings than this config asks for: {}. Put them back, or start a new run in another directory", checkpoint.display(), joined_by_semicolons(changes))]
    ChangedOnResume {
        /// The checkpoint's directory.
        checkpoint: PathBuf,
        /// Each key with the two values.
        changes: Vec<Change>,
    },

    /// The run does not fit in memory. Nothing was allocated.
    #[error("{0}")]
    OutOfMemory(Box<Shortage>),

    /// A resumed run does not fit in memory as its checkpoint's run was computed. Nothing was allocated.
    #[error("{shortage}. The micro-batch and the recompute mode are those of {}: add --rebatch to change them (the weights then agree with an uninterrupted run's up to rounding)", checkpoint.display())]
    OutOfMemoryOnResume {
        /// The checkpoint's directory.
        checkpoint: PathBuf,
        /// What it needs, and what would fit.
        shortage: Box<Shortage>,
    },

    /// The config computes a step in another way than the checkpoint's run did.
    #[error("{} was trained with another micro-batch, recompute mode or number of virtual shards than this config asks for: {}. Put them back to resume bit for bit, or add --rebatch to change them (the weights then agree up to rounding)", checkpoint.display(), joined_by_semicolons(changes))]
    RebatchedOnResume {
        /// The checkpoint's directory.
        checkpoint: PathBuf,
        /// Each key with the two values.
        changes: Vec<Change>,
    },

    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),

    /// A checkpoint could not be saved, found or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// Training diverged.
    #[error("training diverged at step {}: {reason}. Lower optimizer.learning_rate, raise scheduler.warmup_steps (`plan --config FILE --unstable` suggests values), or resume from an earlier checkpoint{}", grouped(*step), newest(last_checkpoint.as_ref()))]
    Diverged {
        /// The step at which the guard gave up.
        step: u64,
        /// What the guard saw.
        reason: String,
        /// The newest checkpoint, taken before the divergence.
        last_checkpoint: Option<PathBuf>,
    },

    /// The run directory was moved, renamed or removed while it was trained in.
    #[error("{} is no longer the directory that this run was started in, which was {}", directory.display(), whereabouts(now.as_ref()))]
    Moved {
        /// The path it was started with.
        directory: PathBuf,
        /// Where it is now, where that is known.
        now: Option<PathBuf>,
    },

    /// Another trainer has taken the run over, on a file system without locks.
    #[error("process {pid} on {host} has taken {} over: this trainer was suspended, or could not reach the disk, for half a minute. It stops and saves nothing; the run goes on there", directory.display())]
    TakenOver {
        /// The run directory.
        directory: PathBuf,
        /// The new owner's process id.
        pid: u32,
        /// The new owner's host name.
        host: String,
    },

    /// A model does not fit in memory. Nothing was allocated.
    #[error("{purpose} needs {} of memory, and there is room for {budget}: take a smaller model or fewer tokens, or make more memory free", bytes(*needed_bytes))]
    NoRoom {
        /// What needs it, such as "generating 100 tokens with the model in checkpoints/step-00001000".
        purpose: String,
        /// Bytes that it needs.
        needed_bytes: u64,
        /// The memory that is available.
        budget: Budget,
    },

    /// A signal or the time limit asked the program to stop, and it did so in order.
    #[error("stopped by {0}{hint}", hint = if *.0 == StopReason::TimeLimit { ", before a step could be trained and saved: give it more" } else { "" })]
    Interrupted(StopReason),

    /// A rank of the run cannot read its data; all of them say so.
    #[error("rank {rank}: {message}")]
    DataOnRank {
        /// The first such rank.
        rank: usize,
        /// What it says.
        message: String,
    },

    /// Another rank of the run has ended, or cannot be reached.
    #[error("{0}")]
    RankLost(String),

    /// An operation refused its buffers.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),

    /// The decoder refused what it was given.
    #[error(transparent)]
    Model(#[from] model::Error),

    /// A file of the run could not be read or written.
    #[error("cannot {action} {}: {}", path.display(), in_words(source))]
    Io {
        /// What was tried, such as "write".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl TrainerError {
    /// The exit code of a program that ends with this error.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            // Of the data's errors, those that the request caused, not the data.
            Self::Request(_)
            | Self::Config(_)
            | Self::Locked { .. }
            | Self::ChangedOnResume { .. }
            | Self::RebatchedOnResume { .. }
            | Self::Data(
                DataError::NoSource
                | DataError::DatasetName { .. }
                | DataError::Pattern { .. }
                | DataError::HubSetting { .. }
                | DataError::Setting { .. }
                | DataError::Tokenizer { .. }
                | DataError::NoBos { .. }
                | DataError::ChatTemplate { .. }
                | DataError::NoChatTemplate { .. }
                | DataError::Cursor { .. },
            ) => ExitCode::WrongRequest,
            Self::Data(_) | Self::DataOnRank { .. } => ExitCode::DataUnreadable,
            Self::OutOfMemory(_) | Self::OutOfMemoryOnResume { .. } | Self::NoRoom { .. } => ExitCode::OutOfMemory,
            Self::Kernel(error) | Self::Model(model::Error::Kernel(error)) => match error {
                kernels::Error::NoCuda { .. } => ExitCode::WrongRequest,
                kernels::Error::OutOfMemory { .. } | kernels::Error::HostMemory { .. } => ExitCode::OutOfMemory,
                _ => ExitCode::Unexpected,
            },
            Self::Checkpoint(error) => return error.exit_code(),
            Self::Diverged { .. } | Self::Model(model::Error::NotFinite) => ExitCode::Diverged,
            // A time limit that leaves no time to train is an error: nothing was saved.
            Self::Interrupted(reason) if *reason != StopReason::TimeLimit => return reason.exit_code(),
            Self::Interrupted(_)
            | Self::Model(_)
            | Self::Moved { .. }
            | Self::TakenOver { .. }
            | Self::RankLost(_)
            | Self::Io { .. } => ExitCode::Unexpected,
        };
        code as u8
    }

    /// Whether there was too little memory.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.exit_code() == ExitCode::OutOfMemory as u8
    }

    /// Converts an error of the model: a prompt or settings that it refuses are a [`TrainerError::Request`], with exit
    /// code 2.
    pub(crate) fn from_request(error: model::Error) -> Self {
        match error {
            model::Error::ContextFull { .. } | model::Error::UnknownToken { .. } | model::Error::Sampling { .. } => {
                Self::Request(error.to_string())
            }
            other => other.into(),
        }
    }

    /// Whether this is the result of a stop request rather than a failure.
    pub fn is_interruption(&self) -> bool {
        matches!(
            self,
            Self::Interrupted(_) | Self::Data(DataError::Interrupted) | Self::Checkpoint(CheckpointError::Interrupted)
        )
    }

    /// Adds action and path to an I/O error: `File::open(path).map_err(TrainerError::io("open", path))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

fn joined_by_semicolons(changes: &[Change]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn newest(checkpoint: Option<&PathBuf>) -> String {
    checkpoint.map_or_else(String::new, |path| format!(" (the newest is {})", path.display()))
}

/// Says where the directory of a run went, and how to go on.
fn whereabouts(now: Option<&PathBuf>) -> String {
    let nothing_saved = "training stops without saving into another directory. Resume from the last checkpoint";
    match now.map(|path| path.display()) {
        Some(now) => format!(
            "moved and is now {now}: {nothing_saved} with `--resume` and the config in {now}, or move it back first"
        ),
        None => format!("moved or removed: {nothing_saved} where it is now, with `--resume`"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_say_what_where_and_the_way_out() {
        let change = |key: &str, was, is| Change { key: key.to_owned(), was, is };
        let changed_config = TrainerError::ChangedOnResume {
            checkpoint: "/runs/e/checkpoints/step-00000005".into(),
            changes: vec![
                change("data.sequence_length", json!(256), json!(512)),
                change("runtime.precision", json!("fp32"), json!("bf16")),
            ],
        };
        let locked = TrainerError::Locked { directory: "/runs/e".into(), pid: 42, host: "node7".into() };
        let diverged = TrainerError::Diverged {
            step: 120,
            reason: "the gradients of 10 steps in a row were not finite".into(),
            last_checkpoint: Some("/runs/e/checkpoints/step-00000100".into()),
        };
        let name = DataError::DatasetName { name: "fine web".into() };
        let problem = "is `huggingface.co`, which is not a URL like https://huggingface.co".into();
        let endpoint = DataError::HubSetting { setting: "HF_ENDPOINT".to_owned(), problem };
        let messages: Vec<String> = [&changed_config, &locked, &diverged, &name.into(), &endpoint.into()]
            .iter()
            .map(|error| format!("{}: {error}", error.exit_code()))
            .collect();
        insta::assert_snapshot!(messages.join("\n"));
    }
}
