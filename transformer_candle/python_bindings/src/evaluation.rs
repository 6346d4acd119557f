//! Measuring a trained model on held-out text.

use std::path::PathBuf;

use dataset::hub::HubSettings;
use pyo3::prelude::*;
use training::commands::ModelSource;
use training::commands::evaluate::{self, EvaluateOptions};
use training::report::SampleReport;

use crate::arguments::Integer;
use crate::machine::device_of;
use crate::signals::stoppable;
use crate::values::{ToPython, value_class};

value_class! {
    /// What one evaluation found.
    EvaluationReport(training::report::EvaluationReport) {
        /// Optimizer steps taken before it.
        step: u64,
        /// Mean over the held-out target tokens, nats.
        loss: f64,
        /// `exp(loss)`.
        perplexity: f64,
        /// Bits per byte of the text, which tokenizers cannot flatter; None where tokens have no fixed length in bytes.
        bits_per_byte: Option<f64>,
        /// Target tokens evaluated.
        tokens: u64,
        /// What the model made of `runtime.evaluation.prompts`, as pairs of prompt and text.
        samples: Vec<(String, String)>,
    }

    fn __repr__(&self) -> String {
        format!("EvaluationReport(step={}, loss={}, tokens={})", self.0.step, self.0.loss, self.0.tokens)
    }
}

impl ToPython<Vec<(String, String)>> for Vec<SampleReport> {
    fn to_python_value(&self) -> Vec<(String, String)> {
        self.iter().map(|sample| (sample.prompt.clone(), sample.text.clone())).collect()
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
    let options = EvaluateOptions {
        model: ModelSource::of_directory(checkpoint),
        input,
        text_column: text_column.to_owned(),
        max_sequences: max_sequences.map(|most| most.0),
        device: device_of(device)?,
        json: false,
    };
    let hub = HubSettings::from_environment();
    stoppable(py, |stop| evaluate::run(&options, &hub, stop)).map(EvaluationReport::from)
}
