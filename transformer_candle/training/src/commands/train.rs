//! `train`: trains a run, from its config to its last checkpoint.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser};
use run_config::{Device, ResolvedRun, RunConfig, TimeSpan};

use super::count::at_least_one;
use super::{ConfigSource, NamedRun, arguments};
use crate::Result;
use crate::checkpoint;
use crate::environment::VERSION;
use crate::launcher::Launcher;
use crate::lock::RunLock;
use crate::profile::ProfileSteps;
use crate::progress::ProgressMode;
use crate::ranks::Ranks;
use crate::run::{RunOutcome, run_training};
use crate::run_options::{ResumeFrom, RunOptions};
use crate::stop::StopSignal;

/// What `train` takes.
#[derive(Debug, Clone, Args)]
pub struct TrainOptions {
    /// The run to train.
    #[command(flatten)]
    pub source: ConfigSource,
    /// Set a key of the config, as in `optimizer.learning_rate=1e-3`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Resume from the newest intact checkpoint, or from the one named.
    #[arg(long, value_name = "latest|DIR", num_args = 0..=1, default_missing_value = "latest")]
    #[arg(value_parser = PathBufValueParser::new().map(resume_from))]
    pub resume: Option<ResumeFrom>,
    /// With --resume: compute steps as the config says (micro-batch, accumulation, recompute mode), not as the
    /// checkpoint's run did. The weights then agree with those of an uninterrupted run up to rounding only.
    #[arg(long)]
    pub rebatch: bool,
    /// With --resume: accept local files that have changed since the checkpoint, such as a repaired download. What the
    /// run has consumed must still be the same: its batches are made again from the changed files and compared.
    #[arg(long)]
    pub accept_changed_data: bool,
    /// Where to compute: auto, cpu, cuda or cuda:N. [default: the config's runtime.device]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<Device>,
    /// Stop after this many optimizer steps in all, with a checkpoint.
    #[arg(long, value_name = "N", value_parser = at_least_one::<u64>)]
    pub max_steps: Option<u64>,
    /// Save and end before this much time has passed since the program was started, as in 11h50m: the time limit of a
    /// job, or the hours that are rented.
    #[arg(long, value_name = "TIME")]
    pub time_limit: Option<TimeSpan>,
    /// Profile steps: a range, as in 10-12 or 10..13, or how many after the first two. A trace for
    /// <https://ui.perfetto.dev> and a summary of where the time goes are written to `profile/` in the run's folder.
    #[arg(long, value_name = "STEPS")]
    pub profile: Option<ProfileSteps>,
}

impl TrainOptions {
    /// Returns the config to train, and the checkpoint to resume from. A checkpoint in place of the run, or after
    /// `--resume` where no run is named, says both.
    fn config_and_resume(&self) -> Result<(PathBuf, Option<ResumeFrom>)> {
        let ConfigSource { run, config } = &self.source;
        let named_run = match (&self.resume, run, config) {
            (_, _, Some(config)) => return Ok((config.clone(), self.resume.clone())),
            (Some(ResumeFrom::Directory(directory)), None, None) => NamedRun::find_or_newest(Some(directory))?,
            (_, run, None) => NamedRun::find_or_newest(run.as_deref())?,
        };
        let resume = match (&self.resume, &named_run.model, run) {
            (Some(_), Some(model), None) | (Some(ResumeFrom::Latest), Some(model), Some(_)) => {
                Some(ResumeFrom::Directory(model.clone()))
            }
            (Some(_), None, None) => Some(ResumeFrom::Latest),
            _ => self.resume.clone(),
        };
        Ok((named_run.config_file()?, resume))
    }
}

/// Trains until the last step or until the signal, with a checkpoint at the end either way.
///
/// `lock` is the run directory's, where the caller has taken it already; `ranks` are the processes that train it together.
pub fn run(
    options: &TrainOptions,
    lock: Option<Arc<RunLock>>,
    ranks: Ranks,
    progress: ProgressMode,
    stop: &StopSignal,
) -> Result<RunOutcome> {
    let launcher = Launcher::from_environment();
    let start = launcher.and_then(Launcher::start).unwrap_or_else(Instant::now);
    if let Some(launcher) = launcher {
        launcher.stop_with_it(stop);
    }
    let (config, resume) = options.config_and_resume()?;
    let resolved = load(&config, &options.overrides, resume.as_ref())?;
    if let Some(limit) = options.time_limit {
        stop.time_limit().set(start, limit.duration());
    }
    let TrainOptions { rebatch, accept_changed_data, max_steps, device, profile, .. } = options.clone();
    let options =
        RunOptions { resume, rebatch, accept_changed_data, lock, max_steps, device, profile, progress, ranks };
    run_training(resolved, &options, stop)
}

/// Runs the command line `words` of `train`, the first of which is the program's name, as one of several ranks; returns
/// its exit code.
///
/// # Errors
/// [`TrainerError::Request`](crate::TrainerError::Request) for words that make no command; else whatever training ends
/// with.
pub fn run_rank(words: impl IntoIterator<Item = OsString>, ranks: Ranks, stop: &StopSignal) -> Result<u8> {
    super::program::log_to_stderr();
    let TrainCommandLine { options } = arguments::parse_from(words)?;
    Ok(run(&options, None, ranks, ProgressMode::Auto, stop)?.exit_code())
}

/// Reads a config for a new run, or for one that is resumed: a tokenizer whose file is gone is taken from the
/// checkpoint.
pub fn load(config: &Path, overrides: &[String], resume: Option<&ResumeFrom>) -> Result<ResolvedRun> {
    let Some(from) = resume else { return Ok(RunConfig::load(config, overrides)?) };
    let tokenizer = |folder: &Path| match from {
        ResumeFrom::Latest => checkpoint::newest_tokenizer(folder),
        ResumeFrom::Directory(directory) => Some(checkpoint::tokenizer_in(directory)),
    };
    Ok(RunConfig::load_with_checkpoint(config, overrides, &tokenizer)?)
}

pub(super) fn main(options: &TrainOptions, lock: Option<Arc<RunLock>>, stop: &StopSignal) -> Result<u8> {
    Ok(run(options, lock, Ranks::ONE, ProgressMode::Auto, stop)?.exit_code())
}

fn resume_from(directory: PathBuf) -> ResumeFrom {
    if directory == Path::new("latest") {
        return ResumeFrom::Latest;
    }
    ResumeFrom::Directory(checkpoint::pointed_checkpoint(&directory).unwrap_or(directory))
}

/// Train a model from a config file.
///
/// Streams the data set that `streaming_config.json` beside the config names; without that file it reads
/// `data.train_shards`.
#[derive(Debug, Parser)]
#[command(name = "train", version = VERSION, max_term_width = 100)]
struct TrainCommandLine {
    #[command(flatten)]
    options: TrainOptions,
}

/// Runs the program `train`, which has the command of that name alone.
pub fn program() -> ExitCode {
    super::program::run(|TrainCommandLine { options }, stop| main(&options, None, stop))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declarations_are_consistent() {
        TrainCommandLine::command().debug_assert();
    }
}
