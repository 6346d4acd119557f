//! `validate-data`: proves from a run's ledger what it was trained on.

use std::path::PathBuf;

use dataset::hub::HubSettings;
use pyo3::prelude::*;
use training::commands::validate_data::{self as command, ValidateDataOptions};

use crate::arguments::Integer;
use crate::signals::stoppable;
use crate::values::value_class;

value_class! {
    /// What was proven about a run's data; prints as `validate-data` does.
    DataReport(command::DataReport) {
        /// What does not fit; empty where every document was used exactly once.
        problems: Vec<String>,
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("DataReport(step={}, {} problems)", self.0.step, self.0.problems.len())
    }
}

/// Prove from a run's ledger that every document of an epoch was used exactly once, and make steps' batches again.
#[pyfunction]
#[pyo3(signature = (run, replay = Vec::new()))]
pub fn validate_data(py: Python<'_>, run: PathBuf, replay: Vec<Integer<u64>>) -> PyResult<DataReport> {
    let options =
        ValidateDataOptions { run: Some(run), replay: replay.into_iter().map(|step| step.0).collect(), json: false };
    let hub = HubSettings::from_environment();
    stoppable(py, |stop| command::run(&options, &hub, stop)).map(DataReport)
}
