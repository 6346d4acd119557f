//! The commands: the options of each and what it does are in its file. They are plain functions over plain options, so
//! that Python calls the same ones; a program puts them on a command line and runs them with [`program::run`].

pub mod arguments;
pub mod bench;
pub mod checkpoint;
mod config_source;
mod count;
mod declared;
pub mod evaluate;
pub mod generate;
mod model_source;
mod named_run;
pub mod output;
pub mod plan;
pub mod program;
mod replayed_step;
pub mod train;
mod until_stopped;
pub mod validate_data;

use std::ffi::OsString;
use std::sync::Arc;

use clap::{Parser, Subcommand};

use crate::Result;
use crate::lock::RunLock;
use crate::stop::StopSignal;

pub use config_source::ConfigSource;
pub use count::parse_count;
pub use declared::{DeclaredCommand, DeclaredOption, declared};
pub use model_source::{ModelName, ModelSource};
pub use named_run::{NamedRun, runs, runs_root};
pub use output::{Output, Stdout};

/// The commands that `transformer-candle` and `orchestrate` share.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model from a config file.
    ///
    /// Streams the data set that `streaming_config.json` beside the config names; without that file it reads
    /// `data.train_shards`.
    Train(train::TrainOptions),
    /// Show what a config needs: memory, speed, time, disk, cost, and what would fit.
    Plan(plan::PlanOptions),
    /// Continue a text with a trained model.
    Generate(generate::GenerateOptions),
    /// Measure a trained model's loss on held-out text.
    Evaluate(evaluate::EvaluateOptions),
    /// Measure a config's training speed on synthetic tokens.
    Bench(bench::BenchOptions),
    /// Prove from a run's ledger that every document was used exactly once.
    ValidateData(validate_data::ValidateDataOptions),
    /// List or verify checkpoints.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
}

/// A command line of [`Command`]s alone.
#[derive(Debug, Parser)]
#[command(name = "transformer-candle")]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

/// Runs the command that `words` say, the first of which is the program's name, and returns its exit code. Its answer
/// goes to `output`, its log to stderr.
///
/// `lock` is the run directory's, where the caller has taken it already and the command is `train`.
///
/// # Errors
/// [`TrainerError::Request`](crate::TrainerError::Request) for words that make no command; else whatever the command
/// ends with.
pub fn run(
    words: impl IntoIterator<Item = OsString>,
    lock: Option<Arc<RunLock>>,
    output: &mut dyn Output,
    stop: &StopSignal,
) -> Result<u8> {
    program::log_to_stderr();
    arguments::parse_from::<CommandLine>(words)?.command.run(lock, output, stop)
}

impl Command {
    /// Runs the command and returns its exit code; `lock` as for [`run`].
    ///
    /// # Errors
    /// Any error that the command ends with.
    pub fn run(self, lock: Option<Arc<RunLock>>, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
        match self {
            Self::Train(options) => train::main(&options, lock, stop),
            Self::Plan(options) => plan::main(&options, output),
            Self::Generate(options) => generate::main(&options, output, stop),
            Self::Evaluate(options) => evaluate::main(&options, output, stop),
            Self::Bench(options) => bench::main(&options, output),
            Self::ValidateData(options) => validate_data::main(&options, output, stop),
            Self::Checkpoint(command) => checkpoint::main(&command, output, stop),
        }
    }
}
