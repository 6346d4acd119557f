//! `streaming_config.json`: which data set of the Hugging Face Hub a run streams.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, Problem};

/// The data set that a run streams. The file is beside the run's config; one with only the first five keys is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamingConfig {
    /// The data set's name on the Hub, such as `HuggingFaceFW/fineweb`, or `demo`.
    pub dataset: String,
    /// The split, such as `train`.
    pub split: String,
    /// Train on this many documents only, the first in listing order, repeatedly; `None`: on all.
    pub max_samples: Option<u64>,
    /// Not used by the trainer; at least 1.
    pub stream_batch_size: usize,
    /// Name of the experiment, see [`check_experiment_name`].
    pub experiment: String,
    /// The data set's configuration, such as `sample-10BT`; `None`: its default one.
    #[serde(default)]
    pub config: Option<String>,
    /// The commit, branch or tag of the data set; `None`: its main branch.
    #[serde(default)]
    pub revision: Option<String>,
    /// The column that holds the text.
    #[serde(default = "default_text_column")]
    pub text_column: String,
    /// The run's `tokenizer.json`: relative to this file's folder (or, where it is not there, to the current one) or
    /// absolute.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
}

fn default_text_column() -> String {
    "text".to_owned()
}

impl StreamingConfig {
    /// The file's name in a run's folder.
    pub const FILE_NAME: &str = "streaming_config.json";

    /// Creates the config of a data set given by its name and split only.
    pub fn new(dataset: &str, split: &str) -> Self {
        Self {
            dataset: dataset.to_owned(),
            split: split.to_owned(),
            max_samples: None,
            stream_batch_size: 1,
            experiment: String::new(),
            config: None,
            revision: None,
            text_column: default_text_column(),
            tokenizer: None,
        }
    }

    /// Reads and checks a `streaming_config.json`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = crate::format::read_text(path, crate::format::LARGEST_CONFIG)
            .map_err(|problem| ConfigError::one(path, problem))?;
        let streaming: Self = serde_json::from_str(&text)
            .map_err(|error| ConfigError::one(path, Problem::of_file(format!("is not a streaming config: {error}"))))?;
        let problems = streaming.problems();
        if problems.is_empty() { Ok(streaming) } else { Err(ConfigError::new(Some(path), problems)) }
    }

    /// Writes the file as indented JSON, the first five keys first. The file is replaced as a whole.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let mut text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        text.push('\n');
        let staging = path.with_extension("json.partial");
        std::fs::write(&staging, text)?;
        std::fs::rename(&staging, path)
    }

    /// Returns the problems of the values.
    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (key, value) in [("dataset", &self.dataset), ("split", &self.split), ("text_column", &self.text_column)] {
            if value.trim().is_empty() {
                problems.push(Problem::new(key, "is empty"));
            }
        }
        if self.max_samples == Some(0) {
            problems
                .push(Problem::new("max_samples", "must be at least 1").suggest("write null for the whole data set"));
        }
        if self.stream_batch_size == 0 {
            problems.push(Problem::new("stream_batch_size", "must be at least 1"));
        }
        problems.extend(check_experiment_name(&self.experiment).err());
        problems
    }
}

/// Checks the name of an experiment, which becomes a folder: `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`.
pub fn check_experiment_name(name: &str) -> Result<(), Problem> {
    let valid = name.len() <= 64
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(|character| character.is_ascii_alphanumeric() || "._-".contains(character));
    if valid {
        return Ok(());
    }
    Err(Problem::new("experiment", format!("{name:?} cannot be the name of an experiment"))
        .suggest("use 1 to 64 letters, digits, `.`, `_` or `-`, starting with a letter or digit"))
}
