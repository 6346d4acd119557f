//! The stream of packed sequences that training sees, as arrays of `NumPy`.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use dataset::{Cursor, Mixture, StreamSettings, Tokenizer};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::arguments::detached;
use crate::config::RunConfig;
use crate::json;
use crate::of_process::OfProcess;

type Pair<'py> = (Bound<'py, PyAny>, Bound<'py, PyArray2<i32>>);

/// The batches of a run, one optimizer step's sequences at a time.
#[pyclass(module = "orchestrator._native")]
pub struct TokenStream {
    stream: Mutex<OfProcess<dataset::TokenStream>>,
    sequences: usize,
}

#[pymethods]
impl TokenStream {
    #[new]
    #[pyo3(signature = (config, state = None))]
    fn new(py: Python<'_>, config: &RunConfig, state: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let run = &config.0;
        let cursor: Option<Cursor> = state.map(json::from_python).transpose()?;
        let opened = detached(py, || {
            let tokenizer = run.config.tokenizer.tokenizer_json.as_deref().unwrap_or(Path::new("tokenizer.json"));
            let tokenizer = Tokenizer::load(tokenizer, &run.special_tokens)?;
            dataset::TokenStream::open(Mixture::from_run(run)?, &StreamSettings::from_run(run), &tokenizer, cursor)
        });
        let stream = Mutex::new(OfProcess::new(opened?));
        Ok(Self { stream, sequences: run.config.data.sequences_per_step })
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Pair<'py>>> {
        py.check_signals()?;
        let Self { stream, sequences } = self;
        let stream = stream.get_mut().unwrap_or_else(PoisonError::into_inner).usable("TokenStream")?;
        let batch = detached(py, || stream.next_sequences(*sequences))?;
        if batch.is_empty() {
            return Ok(None);
        }
        let shape = [batch.sequences(), batch.sequence_length];
        // The vectors become the arrays: nothing is copied. Ids fit in an i32, so the same bytes are read as one.
        let inputs = PyArray1::from_vec(py, batch.inputs).reshape(shape)?.call_method1("view", ("int32",))?;
        let targets = PyArray1::from_vec(py, batch.targets).reshape(shape)?;
        Ok(Some((inputs, targets)))
    }

    /// Where the next batch starts, as plain values: `TokenStream(config, state=...)` goes on exactly there.
    fn state<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).unthreaded();
        json::to_python(py, &stream.cursor())
    }
}
