//! Finding and checking the directory of the model that a command works on.

use std::path::PathBuf;

use pyo3::prelude::*;
use training::checkpoint::Checkpoint;
use training::commands::{ModelName, ModelSource};

use crate::json;
use crate::signals::stoppable;

/// Return the directory of a checkpoint, of the newest intact one of a run or an experiment, or of any model in Hugging
/// Face's format. The files of a checkpoint are verified.
#[pyfunction]
#[pyo3(signature = (checkpoint = None, experiment = None))]
pub fn model_directory(py: Python<'_>, checkpoint: Option<PathBuf>, experiment: Option<String>) -> PyResult<PathBuf> {
    stoppable(py, |stop| {
        let cancel = stop.cancel_token();
        let name = ModelName { run: None, checkpoint, experiment };
        ModelSource { name, base_model: None }.read(&cancel, |checkpoint| {
            if checkpoint.is_checkpoint() {
                checkpoint.verify(&cancel)?;
            }
            Ok(checkpoint.directory().to_owned())
        })
    })
}

/// Return what a file that is named in place of a model's folder is, and what to name instead; None if it is no file.
#[pyfunction]
pub fn model_file_problem(path: PathBuf) -> Option<String> {
    run_config::model_file_problem(&path)
}

/// Return the `config.json` of a model directory with every key, as training would save it, if the decoder runs the
/// model. Its weights are checked: all of them are there and of the right shape, and with `read_weights` finite.
#[pyfunction]
#[pyo3(signature = (directory, read_weights = true))]
pub fn checked_model_config(py: Python<'_>, directory: PathBuf, read_weights: bool) -> PyResult<String> {
    stoppable(py, |stop| {
        Ok(Checkpoint::open(&directory)?.checked_config(read_weights, &stop.cancel_token())?.to_string())
    })
}

/// Compare adapters with their model, and return where that is, whether the adapters record what its files are,
/// their rank and their scale.
#[pyfunction]
#[pyo3(signature = (directory, base_model = None))]
pub fn checked_adapters(py: Python<'_>, directory: PathBuf, base_model: Option<PathBuf>) -> PyResult<Bound<'_, PyAny>> {
    let adapters = stoppable(py, |stop| {
        Ok(Checkpoint::open(&directory)?.beside(base_model.as_deref()).checked_adapters(&stop.cancel_token())?)
    })?;
    json::to_python(py, &adapters)
}

/// Check adapters that training is to start from beside a model: they were trained beside it, and their weights are
/// whole, of the right shapes and finite.
#[pyfunction]
pub fn check_start_adapters(py: Python<'_>, directory: PathBuf, model: PathBuf) -> PyResult<()> {
    stoppable(py, |stop| {
        let cancel = stop.cancel_token();
        let adapters = Checkpoint::open(&directory)?.beside(Some(&model));
        adapters.check_base(&model, &cancel)?;
        adapters.pretrained_adapters(&adapters.model()?.shape, &cancel)?;
        Ok(())
    })
}

/// Return the tokenizer of a model with its special tokens, chat templates and the tokens that end a text or a turn.
#[pyfunction]
#[pyo3(signature = (directory, base_model = None, date = None))]
pub fn model_tokens(
    py: Python<'_>,
    directory: PathBuf,
    base_model: Option<PathBuf>,
    date: Option<String>,
) -> PyResult<Bound<'_, PyAny>> {
    let tokens = stoppable(py, |_| {
        let checkpoint = Checkpoint::open(&directory)?.beside(base_model.as_deref());
        training::model_tokens::model_tokens(&checkpoint, date)
    })?;
    json::to_python(py, &tokens)
}
