//! `train`: a run from its config to its last checkpoint.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use run_config::{Device, RunConfig};

use crate::Result;
use crate::progress::ProgressMode;
use crate::run::{Outcome, RunOptions, run_training};
use crate::stop::StopSignal;
use crate::trainer::ResumeFrom;

/// What `train` takes.
#[derive(Debug, Clone, Args)]
pub struct TrainOptions {
    /// The run's config: YAML, TOML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub config: PathBuf,
    /// Set a key of the config, as in `optimizer.learning_rate=1e-3`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Go on from the newest sound checkpoint, or from the one named.
    #[arg(long, value_name = "latest|DIR", num_args = 0..=1, default_missing_value = "latest")]
    #[arg(value_parser = PathBufValueParser::new().map(resume_from))]
    pub resume: Option<ResumeFrom>,
    /// Where to compute: auto, cpu, cuda or cuda:N. [default: the config's runtime.device]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<Device>,
    /// Stop after this many optimizer steps in all, with a checkpoint.
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,
}

/// Trains until the last step or until the signal, with a checkpoint at the end either way.
pub fn run(options: &TrainOptions, progress: ProgressMode, stop: &StopSignal) -> Result<Outcome> {
    let resolved = RunConfig::load(&options.config, &options.overrides)?;
    let TrainOptions { resume, max_steps, device, .. } = options.clone();
    run_training(resolved, &RunOptions { resume, max_steps, device, progress }, stop)
}

pub(super) fn main(options: &TrainOptions, stop: &StopSignal) -> Result<u8> {
    Ok(run(options, ProgressMode::Auto, stop)?.exit_code())
}

fn resume_from(directory: PathBuf) -> ResumeFrom {
    if directory == Path::new("latest") { ResumeFrom::Latest } else { ResumeFrom::Directory(directory) }
}
