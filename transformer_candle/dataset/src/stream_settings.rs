//! The settings of a token stream.

use run_config::{DataConfig, Packing, ResolvedRun};

use crate::held_out_split::SplitSettings;
use crate::{ChatSettings, DataError};

/// Shards of a component that are open at the same time, by default.
pub(crate) const DEFAULT_OPEN_SHARDS: usize = 16;

/// Settings of a stream: what its order depends on besides sources and tokenizer, and how it is prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamSettings {
    /// Tokens per sequence.
    pub sequence_length: usize,
    /// How documents share sequences; if they are kept apart, batches have [`crate::Batch::document_starts`].
    pub packing: Packing,
    /// How conversations are rendered; `None` if rows are text.
    pub chat: Option<ChatSettings>,
    /// Documents in a shuffle window; the windows of all components of a mixture divide it.
    pub shuffle_buffer_size: usize,
    /// Seed of all permutations.
    pub seed: u64,
    /// Number of rows of each component to train on, the first in listing order; `None` for all.
    pub max_samples: Option<u64>,
    /// Shards of a component that are open at the same time.
    pub open_shards: usize,
    /// Fraction of the row groups to hold out; 0 for none.
    pub held_out_fraction: f64,
    /// Passes over the data; `None` for an endless stream. A mixture ends where a component that has ended would come
    /// next. Not part of the fingerprint.
    pub epochs: Option<u64>,
    /// Threads that tokenize. Not part of the fingerprint.
    pub workers: usize,
}

impl Default for StreamSettings {
    /// An endless stream over all data, with nothing held out.
    fn default() -> Self {
        Self {
            sequence_length: 256,
            packing: Packing::default(),
            chat: None,
            shuffle_buffer_size: 8192,
            seed: 0,
            max_samples: None,
            open_shards: DEFAULT_OPEN_SHARDS,
            held_out_fraction: 0.0,
            epochs: None,
            workers: 2,
        }
    }
}

impl StreamSettings {
    /// Returns the settings of a run, with the most workers that it may take. Nothing is held out if the run has
    /// validation data of its own.
    pub fn from_run(run: &ResolvedRun) -> Self {
        let data = &run.config.data;
        let held_out_fraction = if data.validation_shards.is_empty() { data.held_out_fraction } else { 0.0 };
        Self {
            sequence_length: data.sequence_length,
            packing: data.packing,
            chat: ChatSettings::from_config(data),
            shuffle_buffer_size: data.shuffle_buffer_size,
            seed: run.config.runtime.seed,
            max_samples: run.streaming.as_ref().map_or(data.max_samples, |streaming| streaming.max_samples),
            held_out_fraction,
            epochs: run.config.scheduler.total_epochs,
            workers: max_workers(data),
            ..Self::default()
        }
    }

    /// Refuses a setting of 0 that must be at least 1.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        let at_least_one = [
            ("data.sequence_length", self.sequence_length as u64),
            ("data.shuffle_buffer_size", self.shuffle_buffer_size as u64),
            ("max_samples", self.max_samples.unwrap_or(1)),
            ("open_shards", self.open_shards as u64),
            ("data.num_workers", self.workers as u64),
        ];
        match at_least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((setting, _)) => Err(DataError::Setting { setting, must: "at least 1" }),
            None => Ok(()),
        }
    }

    pub(crate) fn split_settings(&self) -> SplitSettings {
        SplitSettings { max_samples: self.max_samples, held_out_fraction: self.held_out_fraction }
    }
}

/// Returns the maximum number of threads that tokenize for a run.
pub fn max_workers(data: &DataConfig) -> usize {
    data.num_workers.at_most(std::thread::available_parallelism().map_or(1, usize::from))
}
