//! The stream of packed sequences that training sees, as arrays of `NumPy`.

use std::sync::{Mutex, PoisonError};

use dataset::hub::HubSettings;
use dataset::{Cursor, Mixture, StreamSettings, Tokenizer, Until};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::config::RunConfig;
use crate::json;
use crate::process_owned::ProcessOwned;
use crate::signals::Signals;

type Pair<'py> = (Bound<'py, PyAny>, Bound<'py, PyArray2<i32>>);

/// The batches of a run, one optimizer step's sequences at a time.
#[pyclass(module = "orchestrator._native")]
pub struct TokenStream {
    stream: Mutex<ProcessOwned<dataset::TokenStream>>,
    sequences: usize,
    signals: Signals,
}

#[pymethods]
impl TokenStream {
    #[new]
    #[pyo3(signature = (config, state = None, stage = 0))]
    fn new(py: Python<'_>, config: &RunConfig, state: Option<&Bound<'_, PyAny>>, stage: usize) -> PyResult<Self> {
        let run = &config.0.at_stage(stage);
        let cursor: Option<Cursor> = state.map(json::from_python).transpose()?;
        let signals = Signals::default();
        let cancel = signals.cancel_token();
        let outcome = signals.run(py, || {
            let tokenizer = Tokenizer::from_run(run)?;
            let mixture = Mixture::from_run(run, &HubSettings::from_environment(), &cancel)?;
            dataset::TokenStream::open(mixture, &StreamSettings::from_run(run), &tokenizer, cursor)
        });
        let stream = Mutex::new(ProcessOwned::new(outcome?));
        Ok(Self { stream, sequences: run.config.data.sequences_per_step, signals })
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pair<'py>>> {
        let Self { stream, sequences, signals } = self;
        let stream = stream.get_mut().unwrap_or_else(PoisonError::into_inner).usable("TokenStream")?;
        let cancel = signals.cancel_token();
        let batch =
            signals.run(py, || stream.next_sequences_until(Until::Count(*sequences), &|| cancel.is_cancelled()))?;
        if batch.is_empty() {
            return Ok(None);
        }
        let shape = [batch.sequences(), batch.sequence_length];
        // The vectors become the arrays: nothing is copied. Ids fit in an i32, so the same bytes are read as one.
        let inputs = PyArray1::from_vec(py, batch.inputs).reshape(shape)?.call_method1("view", ("int32",))?;
        let targets = PyArray1::from_vec(py, batch.targets).reshape(shape)?;
        Ok(Some((inputs, targets)))
    }

    /// Where the next batch starts, as plain values: `TokenStream(config, state=...)` continues exactly there.
    fn state<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).unthreaded();
        json::to_python(py, &stream.cursor())
    }
}
