//! Configs of runs: loading, checking and writing them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use run_config::{AdapterDescription, Format, ResolvedRun};
use training::config_fingerprint::{Change, changed_settings};

use crate::errors::raised;
use crate::json;

/// A run's config with everything filled in and checked.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct RunConfig(pub ResolvedRun);

#[pymethods]
impl RunConfig {
    /// Read a config file for training.
    #[staticmethod]
    #[pyo3(signature = (path, overrides = Vec::new()))]
    fn load(path: PathBuf, overrides: Vec<String>) -> PyResult<Self> {
        run_config::RunConfig::load(&path, &overrides).map(Self).map_err(raised)
    }

    /// Read a config file for commands that need neither tokenizer nor data.
    #[staticmethod]
    #[pyo3(signature = (path, overrides = Vec::new()))]
    fn load_for_planning(path: PathBuf, overrides: Vec<String>) -> PyResult<Self> {
        run_config::RunConfig::load_for_planning(&path, &overrides).map(Self).map_err(raised)
    }

    /// The folder of the config, where everything of the run is written.
    #[getter]
    fn run_directory(&self) -> PathBuf {
        self.0.run_directory.clone()
    }

    /// The config file.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.config_path.clone()
    }

    /// The folder of the run's checkpoints.
    #[getter]
    fn checkpoint_directory(&self) -> Option<PathBuf> {
        self.0.config.runtime.checkpoint.directory.clone()
    }

    /// What one should know though nothing is wrong, one sentence each.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.0.notes.clone()
    }

    /// Every key with its value.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        json::to_python(py, &self.0.config)
    }

    /// The config as commented YAML.
    fn to_yaml(&self) -> String {
        self.0.config.to_commented_yaml()
    }

    fn __repr__(&self) -> String {
        format!("RunConfig({})", self.0.config_path.display())
    }
}

/// Check a config's text with overrides, and return every key with its value. No file is looked at but the
/// `config.json` of `model.init_from`. `flags` names the flags that overrides were typed as, by their keys.
#[pyfunction]
#[pyo3(signature = (text, format = "yaml", overrides = Vec::new(), file = None, flags = BTreeMap::new()))]
pub fn parse_config<'py>(
    py: Python<'py>,
    text: &str,
    format: &str,
    overrides: Vec<String>,
    file: Option<PathBuf>,
    flags: BTreeMap<String, String>,
) -> PyResult<Bound<'py, PyAny>> {
    let format = match format {
        "toml" => Format::Toml,
        "json" => Format::Json,
        _ => Format::Yaml,
    };
    let config = run_config::RunConfig::parse_of_file(text, format, &overrides, file.as_deref())
        .map_err(|error| raised(error.naming(&flags)))?;
    json::to_python(py, &config)
}

/// Return the keys that must not change on resume and that differ, with the run's value and the one of `config`.
#[pyfunction]
pub fn changes_on_resume<'py>(
    py: Python<'py>,
    run: &Bound<'py, PyAny>,
    config: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let changes = changed_settings(&json::from_python(run)?, &json::from_python(config)?);
    let changes: Vec<_> = changes.into_iter().map(|Change { key, was, is }| (key, was, is)).collect();
    json::to_python(py, &changes)
}

/// Return the size of the vocabulary of a `tokenizer.json`: one more than the highest token id.
#[pyfunction]
pub fn vocab_size(tokenizer_json: PathBuf) -> PyResult<usize> {
    run_config::vocab_size(&tokenizer_json).map_err(raised)
}

/// Refuse a `tokenizer.json` that the library tokenizers cannot read.
#[pyfunction]
pub fn check_tokenizer_json(path: PathBuf) -> PyResult<()> {
    dataset::check_tokenizer_json(&path).map_err(raised)
}

/// Refuse an `adapter_config.json` of adapters that compute something else than plain adapters; `config` is its content.
#[pyfunction]
pub fn check_adapter_config(file: PathBuf, config: &Bound<'_, PyAny>) -> PyResult<()> {
    AdapterDescription::of_file(&file, &json::from_python(config)?).map(drop).map_err(raised)
}

/// Return a config's values as YAML with every key and what it means.
#[pyfunction]
pub fn config_to_yaml(config: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(json::from_python::<run_config::RunConfig>(config)?.to_commented_yaml())
}

/// Return the JSON Schema of a config.
#[pyfunction]
pub fn json_schema(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    json::to_python(py, &run_config::RunConfig::json_schema())
}

/// Return the shipped configs: the text of each by its name.
#[pyfunction]
pub fn presets(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    run_config::presets().iter().map(|preset| (preset.name, preset.text)).into_py_dict(py)
}
