//! The commands that work on a run as a whole: the same functions that the program calls.

use std::path::PathBuf;

use dataset::hub::HubSettings;
use pyo3::prelude::*;
use training::TrainerError;
use training::commands::ModelSource;
use training::commands::evaluate::{self, EvaluateOptions};
use training::commands::train::{self, TrainOptions};
use training::progress::ProgressMode;
use training::stop::StopSignal;
use training::trainer::ResumeFrom;

use crate::arguments::{Failure, Integer};
use crate::errors::raised;
use crate::lock::RunLock;
use crate::machine::device_of;
use crate::signals::{interruptible, listening};
use crate::trainer::EvaluationReport;

/// Train as a config says until its end, and return the exit code: 0, or 130 and 143 after a stop by Ctrl-C and SIGTERM.
#[pyfunction(name = "train")]
#[pyo3(signature = (config, overrides = Vec::new(), resume = None, device = None, max_steps = None, rebatch = false, lock = None))]
#[expect(clippy::too_many_arguments, reason = "the keywords of a Python function")]
pub fn train_run(
    py: Python<'_>,
    config: PathBuf,
    overrides: Vec<String>,
    resume: Option<String>,
    device: Option<&str>,
    max_steps: Option<Integer<u64>>,
    rebatch: bool,
    lock: Option<&RunLock>,
) -> PyResult<u8> {
    let options = TrainOptions {
        config,
        overrides,
        resume: resume
            .map(|from| if from == "latest" { ResumeFrom::Latest } else { ResumeFrom::Directory(from.into()) }),
        rebatch,
        device: device.map(device_of).transpose()?,
        max_steps: max_steps.map(|most| most.0),
    };
    let stop = StopSignal::new();
    let lock = lock.and_then(RunLock::shared);
    // A stop is no exception here: the code tells it.
    let (outcome, _) = listening(py, &stop, || train::run(&options, lock, ProgressMode::Auto, &stop));
    match (outcome, stop.requested()) {
        (Err(Failure::Error(error)), Some(signal)) if error.is_interruption() => {
            Err(raised(TrainerError::Interrupted(signal)))
        }
        (outcome, _) => Ok(outcome?.exit_code()),
    }
}

/// Measure a model's loss on its run's held-out text, or on files of one's own.
#[pyfunction(name = "evaluate")]
#[pyo3(signature = (checkpoint, input = Vec::new(), text_column = "text", max_sequences = None, device = "auto"))]
pub fn evaluate_model(
    py: Python<'_>,
    checkpoint: PathBuf,
    input: Vec<String>,
    text_column: &str,
    max_sequences: Option<Integer<usize>>,
    device: &str,
) -> PyResult<EvaluationReport> {
    let model = ModelSource { checkpoint: Some(checkpoint), experiment: None };
    let text_column = text_column.to_owned();
    let device = device_of(device)?;
    let options = EvaluateOptions {
        model,
        input,
        text_column,
        max_sequences: max_sequences.map(|most| most.0),
        device,
        json: false,
    };
    let stop = StopSignal::new();
    let hub = HubSettings::from_environment();
    interruptible(py, &stop, || evaluate::run(&options, &hub, &stop)).map(EvaluationReport::from)
}
