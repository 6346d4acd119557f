//! A loaded config with everything that belongs to it.

use std::path::{Path, PathBuf};

use crate::{RunConfig, StreamingConfig};

/// A config with every value filled in, and what was found in its folder.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedRun {
    /// The config: paths absolute; `model.vocab_size` and the folders of checkpoints and
    /// TensorBoard filled in; for a run that can train also `tokenizer.tokenizer_json`.
    pub config: RunConfig,
    /// What is streamed, if something is.
    pub streaming: Option<StreamingConfig>,
    /// The folder of the config, which everything of the run is written to.
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

/// Finds the `tokenizer.json` of a checkpoint: takes the folder of the run's checkpoints.
pub type CheckpointTokenizer<'a> = &'a dyn Fn(&Path) -> Option<PathBuf>;
