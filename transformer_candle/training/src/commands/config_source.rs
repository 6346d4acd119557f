//! The config that a command works on: a run's, or a file.

use std::path::PathBuf;

use clap::Args;

use super::NamedRun;
use crate::Result;

/// The config of a run.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub struct ConfigSource {
    /// A run: its name, its directory, a checkpoint of it, or a config file. [default: the newest run]
    #[arg(value_name = "RUN")]
    pub run: Option<PathBuf>,
    /// The run's config: YAML, TOML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl ConfigSource {
    /// Returns the config's path.
    ///
    /// # Errors
    /// [`crate::TrainerError::Request`] if there is no such run, or none at all.
    pub fn file(&self) -> Result<PathBuf> {
        match &self.config {
            Some(config) => Ok(config.clone()),
            None => NamedRun::find_or_newest(self.run.as_deref())?.config_file(),
        }
    }
}
