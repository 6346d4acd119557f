//! Asking a trained model: text that goes on, and logits.

use std::path::{Path, PathBuf};

use numpy::PyArray2;
use pyo3::prelude::*;
use training::commands::ModelSource;
use training::commands::generate::{self as command, GenerateOptions, Prompt};
use training::stop::StopSignal;
use training::trained_model::TrainedModel;

use crate::arguments::{Integer, integer};
use crate::json;
use crate::machine::device_of;
use crate::signals::interruptible;

/// A continued text.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct Completion(training::completion::Completion);

impl From<training::completion::Completion> for Completion {
    fn from(completion: training::completion::Completion) -> Self {
        Self(completion)
    }
}

#[pymethods]
impl Completion {
    /// The text that was continued.
    #[getter]
    fn prompt(&self) -> &str {
        &self.0.prompt
    }

    /// What the model wrote.
    #[getter]
    fn completion(&self) -> &str {
        &self.0.completion
    }

    /// The same as token ids.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.0.tokens.clone()
    }

    /// Tokens written over the seconds they took.
    #[getter]
    fn tokens_per_second(&self) -> f64 {
        self.0.tokens_per_second
    }

    /// Everything as plain values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        json::to_python(py, &self.0)
    }

    fn __str__(&self) -> String {
        format!("{}{}", self.0.prompt, self.0.completion)
    }

    fn __repr__(&self) -> String {
        format!("Completion({:?} + {:?})", self.0.prompt, self.0.completion)
    }
}

/// Continue a text with a model: a checkpoint, a run's folder, or any Llama model in Hugging Face's format.
#[pyfunction]
#[pyo3(signature = (
    checkpoint, prompt, *, max_tokens = 128, temperature = 0.8, top_k = 0, top_p = 1.0, seed = 0, device = "auto"
))]
#[expect(clippy::too_many_arguments, reason = "the keywords of a Python function")]
pub fn generate(
    py: Python<'_>,
    checkpoint: PathBuf,
    prompt: String,
    #[pyo3(from_py_with = integer)] max_tokens: usize,
    temperature: f64,
    #[pyo3(from_py_with = integer)] top_k: usize,
    top_p: f64,
    #[pyo3(from_py_with = integer)] seed: u64,
    device: &str,
) -> PyResult<Completion> {
    let options = GenerateOptions {
        model: ModelSource { checkpoint: Some(checkpoint), experiment: None },
        prompt: Prompt { text: Some(prompt), file: None },
        max_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        device: device_of(device)?,
        json: false,
    };
    let stop = StopSignal::new();
    interruptible(py, &stop, || command::run(&options, &stop)).map(Completion)
}

/// Return the logits behind each token, `[tokens, vocabulary]` in f32.
#[pyfunction]
#[pyo3(signature = (checkpoint, tokens, *, device = "auto"))]
pub fn logits<'py>(
    py: Python<'py>,
    checkpoint: PathBuf,
    tokens: Vec<Integer<u32>>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let device = device_of(device)?;
    let stop = StopSignal::new();
    let tokens: Vec<u32> = tokens.into_iter().map(|token| token.0).collect();
    let rows = interruptible(py, &stop, || {
        TrainedModel::open(Path::new(&checkpoint), device, &stop.cancel_token())?.logits(&tokens, &stop)
    })?;
    Ok(PyArray2::from_vec2(py, &rows)?)
}

/// Return the newest sound checkpoint of an experiment.
#[pyfunction]
pub fn newest_checkpoint(py: Python<'_>, experiment: String) -> PyResult<PathBuf> {
    let (model, stop) = (ModelSource { checkpoint: None, experiment: Some(experiment) }, StopSignal::new());
    interruptible(py, &stop, || model.directory(&stop.cancel_token()))
}
