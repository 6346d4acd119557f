//! The commands that work on a run as a whole: the same functions that the program calls.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use training::commands::ModelSource;
use training::commands::evaluate::{self, EvaluateOptions};
use training::commands::train::{self, TrainOptions};
use training::progress::ProgressMode;
use training::stop::{Signal, StopSignal};
use training::trainer::ResumeFrom;
use training::{Result, TrainerError};

use crate::arguments::{Integer, detached};
use crate::lock::RunLock;
use crate::machine::device_of;
use crate::trainer::EvaluationReport;

/// How often the waiting thread looks for Ctrl-C.
const LISTENING_INTERVAL: Duration = Duration::from_millis(20);

/// Train as a config says until its end, and return the exit code: 0, or 130 and 143 after a stop by Ctrl-C and SIGTERM.
#[pyfunction(name = "train")]
#[pyo3(signature = (config, overrides = Vec::new(), resume = None, device = None, max_steps = None, rebatch = false, lock = None))]
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
    let outcome = listening(py, &stop, || train::run(&options, lock, ProgressMode::Auto, &stop));
    Ok(outcome?.exit_code())
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
    listening(py, &stop, || evaluate::run(&options, &stop)).map(EvaluationReport::from)
}

/// Works on a thread of its own while this one, where Python delivers signals, hands them on to the stop flag.
fn listening<T: Send>(py: Python<'_>, stop: &StopSignal, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    detached(py, || {
        thread::scope(|scope| {
            let worker = thread::Builder::new().spawn_scoped(scope, work).map_err(|error| {
                TrainerError::Request(format!(
                    "the system does not start a thread to work on: {error}. Raise the limit of processes (ulimit -u)"
                ))
            })?;
            while !worker.is_finished() {
                thread::sleep(LISTENING_INTERVAL);
                Python::attach(|py| {
                    if let Err(raised) = py.check_signals() {
                        let interrupted = raised.is_instance_of::<PyKeyboardInterrupt>(py);
                        stop.request(if interrupted { Signal::Interrupt } else { Signal::Terminate });
                    }
                });
            }
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}
