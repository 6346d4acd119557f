//! The trainer as an object: one optimizer step a turn of a `for` loop.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use dataset::hub::HubSettings;
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use run_config::ResolvedRun;
use training::SamplingSettings;
use training::run_options::{ResumeFrom, RunOptions};
use training::stop::StopSignal;
use training::trainer::Step;

use crate::arguments::{detached, integer};
use crate::config::RunConfig;
use crate::evaluation::EvaluationReport;
use crate::generation::Completion;
use crate::json::to_python;
use crate::plan::MemoryPlan;
use crate::process_owned::ProcessOwned;
use crate::signals::interruptible;
use crate::values::value_class;

/// Name of the config file in a run's folder.
const TRAINING_CONFIG: &str = "training.yaml";

value_class! {
    /// What one optimizer step did.
    StepReport(training::report::StepReport) {
        /// Optimizer steps taken, this one included.
        step: u64,
        /// Mean over the step's target tokens, nats, before the update.
        loss: f64,
        /// The step's learning rate.
        learning_rate: f64,
        /// Global norm of the gradients before clipping.
        grad_norm: f64,
        /// Target tokens trained on since the run began.
        tokens: u64,
        /// Target tokens of this step over its seconds.
        tokens_per_second: f64,
        /// Positions of this step, with a target or without, over its seconds.
        positions_per_second: f64,
        /// Model FLOPs of all positions over the GPU's nominal BF16 peak; None where no peak is known, as on a CPU.
        mfu: Option<f64>,
        /// Wall time of the step.
        step_seconds: f64,
        /// Part of it spent waiting for data.
        data_wait_seconds: f64,
        /// Seconds spent saving checkpoints since the step before.
        save_seconds: f64,
        /// Seconds spent evaluating since the step before, samples included.
        evaluation_seconds: f64,
        /// Bytes of the planned buffers.
        memory_bytes: u64,
    }

    fn __repr__(&self) -> String {
        format!(
            "StepReport(step={}, loss={}, tokens_per_second={:.0})",
            self.0.step, self.0.loss, self.0.tokens_per_second
        )
    }
}

/// A model in training. Iterating takes one optimizer step a turn.
#[pyclass(module = "orchestrator._native")]
pub struct Trainer {
    trainer: Mutex<ProcessOwned<training::trainer::Trainer>>,
    /// Raised while a signal ends a call.
    stop: StopSignal,
}

impl Trainer {
    /// Starts a trainer, unless a signal stops it meanwhile.
    fn start(
        py: Python<'_>,
        run: impl FnOnce() -> training::Result<ResolvedRun> + Send,
        options: &RunOptions,
    ) -> PyResult<Self> {
        let (hub, stop) = (HubSettings::from_environment(), StopSignal::new());
        let make = || training::trainer::Trainer::start(run()?, options, &hub, &stop);
        let trainer = interruptible(py, &stop, make)?;
        Ok(Self { trainer: Mutex::new(ProcessOwned::new(trainer)), stop })
    }

    fn inner(&mut self) -> &mut training::trainer::Trainer {
        self.owned().unthreaded()
    }

    fn owned(&mut self) -> &mut ProcessOwned<training::trainer::Trainer> {
        self.trainer.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` without the GIL until a signal stops it, then issues the trainer's notices as warnings.
    fn interruptible<T: Send>(
        &mut self,
        py: Python<'_>,
        work: impl FnOnce(&mut training::trainer::Trainer, &StopSignal) -> training::Result<T> + Send,
    ) -> PyResult<T> {
        let stop = self.stop.clone();
        let trainer = self.owned().usable("Trainer")?;
        let outcome = interruptible(py, &stop, || work(trainer, &stop));
        warn_of_news(py, trainer)?;
        outcome
    }

    /// Runs `work` without the GIL, then issues the trainer's notices as warnings.
    fn detached<T: Send>(
        &mut self,
        py: Python<'_>,
        work: impl FnOnce(&mut training::trainer::Trainer) -> training::Result<T> + Send,
    ) -> PyResult<T> {
        py.check_signals()?;
        let trainer = self.owned().usable("Trainer")?;
        let outcome = detached(py, || work(trainer));
        warn_of_news(py, trainer)?;
        outcome
    }
}

/// Issues the trainer's notices, such as that the disk is full, as Python warnings.
fn warn_of_news(py: Python<'_>, trainer: &mut training::trainer::Trainer) -> PyResult<()> {
    for news in trainer.take_notices() {
        // A path's NUL byte could not have got here.
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(news).unwrap_or_default(), 1)?;
    }
    Ok(())
}

#[pymethods]
impl Trainer {
    /// Start a new run in the config's folder, on the device that the config names or finds.
    #[new]
    fn new(py: Python<'_>, config: &RunConfig) -> PyResult<Self> {
        let run = config.0.clone();
        Self::start(py, || Ok(run), &RunOptions::default())
    }

    /// Resumes a run, given its directory or config file.
    #[staticmethod]
    #[pyo3(signature = (run, overrides = Vec::new(), checkpoint = None, rebatch = false))]
    fn resume(
        py: Python<'_>,
        run: PathBuf,
        overrides: Vec<String>,
        checkpoint: Option<PathBuf>,
        rebatch: bool,
    ) -> PyResult<Self> {
        let config = if run.is_dir() { run.join(TRAINING_CONFIG) } else { run };
        let from = checkpoint.map_or(ResumeFrom::Latest, ResumeFrom::Directory);
        let load = || training::commands::train::load(&config, &overrides, Some(&from));
        let options = RunOptions { resume: Some(from.clone()), rebatch, ..RunOptions::default() };
        Self::start(py, load, &options)
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<StepReport>> {
        self.interruptible(py, |trainer, stop| {
            Ok(match trainer.step_unless(stop, &|_| ())? {
                Step::Done(report) => Some(StepReport(report)),
                Step::Finished | Step::Abandoned => None,
            })
        })
    }

    /// Optimizer steps taken since the run began.
    #[getter]
    fn step(&mut self) -> u64 {
        self.inner().steps_done()
    }

    /// What one should know about how it started, one sentence each.
    #[getter]
    fn notes(&mut self) -> Vec<String> {
        self.inner().notes().to_vec()
    }

    /// The newest sample of what the run takes of its machine, as in metrics.jsonl; None before the first.
    #[getter]
    fn utilization<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let sample = self.inner().utilization().cloned();
        sample.map(|sample| to_python(py, &sample)).transpose()
    }

    /// Why iterating is over, such as `all steps are done`; None while there are steps left.
    #[getter]
    fn finished(&mut self) -> Option<String> {
        self.inner().finished()
    }

    /// Return what was found since the last call to hold the run back, one sentence each.
    fn take_advice(&mut self) -> Vec<String> {
        self.inner().take_advice()
    }

    /// Return the buffers it holds.
    fn memory_plan(&mut self) -> MemoryPlan {
        MemoryPlan::from(self.inner().memory_plan().clone())
    }

    /// Measure the loss on the held-out text; None where there is none.
    fn evaluate(&mut self, py: Python<'_>) -> PyResult<Option<EvaluationReport>> {
        let report = self.interruptible(py, training::trainer::Trainer::evaluate_unless)?;
        Ok(report.map(EvaluationReport::from))
    }

    /// Write a checkpoint and return its directory.
    fn save(&mut self, py: Python<'_>) -> PyResult<PathBuf> {
        self.detached(py, training::trainer::Trainer::save)
    }

    /// Continue a text with the weights as they are.
    #[pyo3(signature = (prompt, *, max_tokens = 128, temperature = 0.8, top_k = 0, top_p = 1.0, seed = 0))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of a Python function")]
    fn generate(
        &mut self,
        py: Python<'_>,
        prompt: &str,
        #[pyo3(from_py_with = integer)] max_tokens: usize,
        temperature: f64,
        #[pyo3(from_py_with = integer)] top_k: usize,
        top_p: f64,
        #[pyo3(from_py_with = integer)] seed: u64,
    ) -> PyResult<Completion> {
        let settings = SamplingSettings { temperature, top_k, top_p, seed };
        let write = |trainer: &mut training::trainer::Trainer, stop: &StopSignal| {
            trainer.generate_unless(prompt, max_tokens, &settings, stop)
        };
        self.interruptible(py, write).map(Completion::from)
    }
}
