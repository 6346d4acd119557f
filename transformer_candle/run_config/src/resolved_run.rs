//! A loaded config with everything that belongs to it.

use std::path::{Path, PathBuf};

use crate::{RunConfig, StreamingConfig};

/// A config with every value filled in, and what was found in its folder.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedRun {
    /// The config: paths absolute; `model.vocab_size` and the folders of checkpoints and
    /// TensorBoard filled in; for a run that can train also `tokenizer.tokenizer_json`.
    pub config: RunConfig,
    /// The `streaming_config.json` beside the config, if there is one.
    pub streaming: Option<StreamingConfig>,
    /// The folder of the config, where the run's output goes by default.
    pub run_directory: PathBuf,
    /// The tokens that are never split, each in the tokenizer's vocabulary.
    pub special_tokens: Vec<String>,
    /// The config file, absolute.
    pub config_path: PathBuf,
    /// Remarks that are not errors, one sentence each, such as a key of older versions that has no
    /// effect.
    pub notes: Vec<String>,
}

impl ResolvedRun {
    /// The run with the config of one of its stages ([`RunConfig::at_stage`]).
    #[must_use]
    pub fn at_stage(&self, stage: usize) -> Self {
        Self { config: self.config.at_stage(stage), ..self.clone() }
    }
}

/// A function that finds the `tokenizer.json` of a checkpoint, given the folder of the run's checkpoints.
pub type CheckpointTokenizer<'a> = &'a dyn Fn(&Path) -> Option<PathBuf>;
