//! Conversations with a trained model.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use training::SamplingSettings;
use training::chat::{ChatOptions, FinishReason};
use training::checkpoint::Checkpoint;

use crate::arguments::integer;
use crate::json::from_python;
use crate::machine::device_of;
use crate::signals::stoppable;
use crate::values::value_class;

value_class! {
    /// An answer.
    Reply(training::chat::Reply) {
        /// Its text.
        text: String,
        /// Its tokens.
        tokens: usize,
        /// Tokens of the conversation before it.
        prompt_tokens: usize,
        /// Tokens per second.
        tokens_per_second: f64,
    }

    /// `stop`, `length` or `context`.
    #[getter]
    fn finish_reason(&self) -> &'static str {
        match self.0.finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// A model that answers in conversations.
#[pyclass(module = "orchestrator._native")]
pub struct ChatModel(Mutex<training::chat::ChatModel>);

#[pymethods]
impl ChatModel {
    /// Read a model and its chat template.
    #[new]
    #[pyo3(signature = (checkpoint, *, base_model = None, chat_template = None, date = None, device = "auto"))]
    fn new(
        py: Python<'_>,
        checkpoint: PathBuf,
        base_model: Option<PathBuf>,
        chat_template: Option<PathBuf>,
        date: Option<String>,
        device: &str,
    ) -> PyResult<Self> {
        let device = device_of(device)?;
        let options = ChatOptions { template: chat_template, date };
        let model = stoppable(py, |stop| {
            let checkpoint = Checkpoint::open(&checkpoint)?.beside(base_model.as_deref());
            training::chat::ChatModel::open(&checkpoint, options, device, &stop.cancel_token())
        })?;
        Ok(Self(Mutex::new(model)))
    }

    /// Whether the template ends the assistant's turns with a token, at which answers end.
    #[getter]
    fn ends_turns(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).ends_turns()
    }

    /// Tokens that a conversation may have.
    #[getter]
    fn context(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).context()
    }

    /// Answer a conversation; `on_text` is called with the answer as it grows.
    #[pyo3(signature = (messages, on_text, *, max_tokens = 1024, temperature = 0.8, top_k = 0, top_p = 1.0, seed = 0))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of a Python function")]
    fn reply(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        on_text: Py<PyAny>,
        #[pyo3(from_py_with = integer)] max_tokens: usize,
        temperature: f64,
        #[pyo3(from_py_with = integer)] top_k: usize,
        top_p: f64,
        #[pyo3(from_py_with = integer)] seed: u64,
    ) -> PyResult<Reply> {
        let messages: Vec<serde_json::Value> = from_python(messages)?;
        let settings = SamplingSettings { temperature, top_k, top_p, seed };
        let mut refused = None;
        let mut show = |text: &str| match Python::attach(|py| on_text.call1(py, (text,))) {
            Ok(_) => ControlFlow::Continue(()),
            Err(error) => {
                refused = Some(error);
                ControlFlow::Break(())
            }
        };
        let reply = stoppable(py, |stop| {
            let mut model = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            model.reply(&messages, max_tokens, &settings, stop, &mut show)
        })?;
        refused.map_or_else(|| Ok(reply.into()), Err)
    }
}
