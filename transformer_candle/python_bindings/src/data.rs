//! Data sets: listing their files, and reading their documents in listing order.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dataset::FolderSplit;
use dataset::hub::{AccessToken, HubSettings, proxy_of, redacted};
use pyo3::prelude::*;
use run_config::{DataConfig, NEWEST_READING_VERSION, StreamingConfig};
use training::units;

use crate::arguments::Integer;
use crate::errors::raised;
use crate::signals::Signals;

/// Where the Hub's access token comes from, such as `in HF_TOKEN`, and what to do if it is not accepted; None without one.
#[pyfunction]
pub fn hub_token() -> Option<(String, String)> {
    let token = AccessToken::from_environment()?;
    Some((token.origin().to_string(), token.origin().remedy()))
}

/// The proxy by which this process reaches a URL, such as `the proxy http://host:3128 that HTTPS_PROXY names`.
#[pyfunction]
pub fn hub_proxy(url: &str) -> Option<String> {
    proxy_of(url)
}

/// A length of time in its two largest units: `15 d 7 h`, `3 min 20 s`, `8 s`.
#[pyfunction]
pub fn duration(seconds: f64) -> String {
    units::time(seconds.max(0.0))
}

/// A URL as messages show it: without user and password, and without its query, which may hold a signature or a key.
#[pyfunction]
pub fn redacted_url(url: &str) -> String {
    redacted(url)
}

/// A data set whose files are known.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct DataSource {
    mixture: dataset::Mixture,
    /// The data set's name, or the patterns.
    #[pyo3(get)]
    name: String,
    /// The commit that is read; None for local files and mixtures.
    #[pyo3(get)]
    revision: Option<String>,
    /// How many files there are.
    #[pyo3(get)]
    files: u64,
    /// Their size together.
    #[pyo3(get)]
    bytes: u64,
}

impl DataSource {
    fn new(source: dataset::DataSource) -> Self {
        let dataset::SourceDescription { name, revision, files, bytes } = source.describe();
        Self { mixture: source.into(), name, revision, files, bytes }
    }
}

#[pymethods]
impl DataSource {
    /// Find a data set of the Hugging Face Hub, or `demo` in the cache folder, and pin its commit.
    #[staticmethod]
    #[pyo3(signature = (
        dataset, split = "train", config = None, revision = None, text_column = "text", on_wait = None,
        reading_version = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of a Python function")]
    fn streaming(
        py: Python<'_>,
        dataset: &str,
        split: &str,
        config: Option<String>,
        revision: Option<String>,
        text_column: &str,
        on_wait: Option<Py<PyAny>>,
        reading_version: Option<u32>,
    ) -> PyResult<Self> {
        let text_column = text_column.to_owned();
        let version = reading_version.unwrap_or(NEWEST_READING_VERSION);
        let streaming = StreamingConfig { config, revision, text_column, ..StreamingConfig::new(dataset, split) };
        let hub = HubSettings::from_environment().with_run_config(&DataConfig::default());
        let waits = hub.retries.clone();
        let signals = Signals::with_callback(on_wait, move || waits.longest());
        let cancel = signals.cancel_token();
        signals.run(py, || dataset::DataSource::streaming(&streaming, hub, version, &cancel)).map(Self::new)
    }

    /// Find local files: paths, folders and globs, relative to the current folder.
    #[staticmethod]
    #[pyo3(signature = (patterns, text_column = "text", reading_version = None, split = None))]
    fn local(
        py: Python<'_>,
        patterns: Vec<String>,
        text_column: &str,
        reading_version: Option<u32>,
        split: Option<&str>,
    ) -> PyResult<Self> {
        let split = FolderSplit::of_training(split);
        let version = reading_version.unwrap_or(NEWEST_READING_VERSION);
        let signals = Signals::default();
        let cancel = signals.cancel_token();
        let list = || dataset::DataSource::local_split(&patterns, Path::new(""), &split, text_column, version, &cancel);
        signals.run(py, list).map(Self::new)
    }

    /// Mix sources with their weights, which are their shares of the text.
    #[staticmethod]
    fn mixture(components: Vec<(PyRef<'_, Self>, f64)>) -> PyResult<Self> {
        let parts = components.iter().flat_map(|(source, weight)| {
            let inner = &source.mixture;
            inner.sources().iter().enumerate().map(move |(index, part)| (part.clone(), weight * inner.weight(index)))
        });
        let mixture = dataset::Mixture::new(parts.collect()).map_err(raised)?;
        let description = mixture.describe();
        let names: Vec<String> = description.iter().map(|part| part.name.clone()).collect();
        let files = description.iter().map(|part| part.files).sum();
        let bytes = description.iter().map(|part| part.bytes).sum();
        Ok(Self { mixture, name: names.join(" and "), revision: None, files, bytes })
    }

    /// Iterate over the documents in listing order, at most `max_samples`; those of a mixture in the proportions of its
    /// weights, each source from its beginning again until all have been read.
    #[pyo3(signature = (max_samples = None, on_wait = None))]
    fn documents(&self, max_samples: Option<Integer<u64>>, on_wait: Option<Py<PyAny>>) -> Documents {
        let waiting = self.mixture.clone();
        let signals = Signals::with_callback(on_wait, move || waiting.retry_status());
        let mixture = self.mixture.cancelled_by(&signals.cancel_token());
        let documents = dataset::Documents::open(mixture, max_samples.map(|most| most.0));
        Documents { documents: Mutex::new(documents), signals }
    }

    /// What was left out of the listing and why, one sentence each.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.mixture.notes()
    }

    fn __repr__(&self) -> String {
        format!("DataSource({:?}, {} files, {} bytes)", self.name, self.files, self.bytes)
    }
}

/// Documents in listing order.
#[pyclass(module = "orchestrator._native")]
pub struct Documents {
    documents: Mutex<dataset::Documents>,
    signals: Signals,
}

#[pymethods]
impl Documents {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<String>> {
        let documents = self.documents.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.signals.run(py, || documents.next().transpose())
    }

    /// Say how many rows were skipped so far, by reason; None if there are none.
    fn describe_skipped(&mut self) -> Option<String> {
        self.documents.get_mut().unwrap_or_else(PoisonError::into_inner).describe_skipped()
    }

    /// Return the notices of skipped rows and corrupted files since the last call, one sentence each.
    fn take_notices(&mut self) -> Vec<String> {
        self.documents.get_mut().unwrap_or_else(PoisonError::into_inner).take_notices()
    }
}

/// Return the folder for what can be made again.
#[pyfunction]
pub fn cache_root() -> PathBuf {
    dataset::cache_root()
}
