//! Finding what a command works on by a run's name, and counts as people type them. Without a name it is the newest run,
//! and stderr says which one.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use training::commands::{self, NamedRun};

use crate::arguments::caught;

/// Return the directory of the run that an experiment's name, a directory, a checkpoint or a config stands for.
#[pyfunction]
#[pyo3(signature = (name = None))]
pub fn run_directory(name: Option<PathBuf>) -> PyResult<PathBuf> {
    Ok(caught(|| NamedRun::find_or_newest(name.as_deref())?.run_directory())?)
}

/// Return the config that an experiment's name, a directory, a checkpoint or a config stands for.
#[pyfunction]
#[pyo3(signature = (name = None))]
pub fn config_of_run(name: Option<PathBuf>) -> PyResult<PathBuf> {
    Ok(caught(|| NamedRun::find_or_newest(name.as_deref())?.config_file())?)
}

/// Return the directory with the model that an experiment's name, a directory, a checkpoint or a config stands for: a
/// model's, a folder of checkpoints or a run's.
#[pyfunction]
#[pyo3(signature = (name = None))]
pub fn model_of_run(name: Option<PathBuf>) -> PyResult<PathBuf> {
    Ok(caught(|| NamedRun::find_or_newest(name.as_deref())?.model_folder())?)
}

/// Return the directories of all runs, the one that was written to last first.
#[pyfunction]
pub fn runs() -> Vec<PathBuf> {
    commands::runs(&commands::runs_root())
}

/// Return a count such as 2000000, 10k, 1e3 or 20B; raise a `ValueError` for anything else.
#[pyfunction]
pub fn parse_count(text: &str) -> PyResult<u64> {
    commands::parse_count(text).map_err(PyValueError::new_err)
}
