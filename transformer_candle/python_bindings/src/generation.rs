//! Inference with a trained model: generated text, and logits.

use std::path::PathBuf;

use numpy::PyArray2;
use pyo3::prelude::*;
use training::SamplingSettings;
use training::checkpoint::Checkpoint;
use training::commands::ModelSource;
use training::commands::generate::{self as command, GenerateOptions, Prompt};
use training::trained_model::TrainedModel;

use crate::arguments::{Integer, integer};
use crate::machine::device_of;
use crate::signals::stoppable;
use crate::values::value_class;

value_class! {
    /// A prompt with its completion.
    Completion(training::completion::Completion) {
        /// The prompt.
        prompt: String,
        /// The generated text.
        completion: String,
        /// The generated token ids.
        tokens: Vec<u32>,
        /// Generated tokens per second.
        tokens_per_second: f64,
    }

    fn __str__(&self) -> String {
        format!("{}{}", self.0.prompt, self.0.completion)
    }

    fn __repr__(&self) -> String {
        format!("Completion({:?} + {:?})", self.0.prompt, self.0.completion)
    }
}

/// Continue a text with a model: a checkpoint, a run's folder, or any model in Hugging Face's format that the decoder runs.
#[pyfunction]
#[pyo3(signature = (
    checkpoint, prompt, *, max_tokens = 128, temperature = 0.8, top_k = 0, top_p = 1.0, seed = 0, device = "auto",
    special = false
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
    special: bool,
) -> PyResult<Completion> {
    let options = GenerateOptions {
        model: ModelSource::of_directory(checkpoint),
        prompt: Prompt { text: Some(prompt), file: None },
        special,
        max_tokens,
        sampling: SamplingSettings { temperature, top_k, top_p, seed },
        device: device_of(device)?,
        json: false,
    };
    stoppable(py, |stop| command::run(&options, stop)).map(Completion)
}

/// Return the logits after each token, `[tokens, vocabulary]` in f32. The first `prompt_tokens` (at most all) pass through
/// the model together, as a prompt does, which is faster; the others one by one, as generated tokens do.
#[pyfunction]
#[pyo3(signature = (checkpoint, tokens, *, prompt_tokens = 0, device = "auto"))]
pub fn logits<'py>(
    py: Python<'py>,
    checkpoint: PathBuf,
    tokens: Vec<Integer<u32>>,
    #[pyo3(from_py_with = integer)] prompt_tokens: usize,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let device = device_of(device)?;
    let tokens: Vec<u32> = tokens.into_iter().map(|token| token.0).collect();
    let rows = stoppable(py, |stop| {
        let cancel = stop.cancel_token();
        let open = |checkpoint: &Checkpoint| TrainedModel::of_checkpoint(checkpoint, device, &cancel);
        let model = ModelSource::of_directory(checkpoint).read(&cancel, open)?;
        model.logits(&tokens, prompt_tokens, stop)
    })?;
    Ok(PyArray2::from_vec2(py, &rows)?)
}
