//! A mixture: one or several sources with weights. A single source is a mixture of one component.

use std::path::Path;

use run_config::{DataConfig, MixtureComponent, ResolvedRun, StreamingConfig};

use crate::hub::{HubSettings, RetryStatus};
use crate::ledger::CorruptedRecord;
use crate::local_files::FolderSplit;
use crate::mixture_schedule::MixtureSchedule;
use crate::{
    CancelToken, ComponentPosition, CorruptedRows, Cursor, DataError, DataSource, FoundCorruption, SourceDescription,
    StreamSettings,
};

/// Maximum bytes of text in the windows of all components together: it bounds memory where documents are long.
pub(crate) const WINDOW_BYTES: usize = 64 << 20;
/// The minimum of a component's window, however small its weight: a smaller window would shuffle little, and the
/// padding at its end would be a larger part of it.
const MIN_COMPONENT_WINDOW: ReadBudget = ReadBudget { documents: 256, bytes: 4 << 20 };

/// How much to read: a number of documents or of bytes, whichever is reached first.
#[derive(Clone, Copy)]
pub(crate) struct ReadBudget {
    pub documents: usize,
    pub bytes: usize,
}

/// One or more sources with their weights. Cheap to clone; clones share the listings.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<DataSource>,
    schedule: MixtureSchedule,
}

impl Mixture {
    /// Mixes sources by their weights. A weight is the fraction of the sequences, and so of the tokens, in proportion
    /// to the sum of all weights.
    pub fn new(components: Vec<(DataSource, f64)>) -> Result<Self, DataError> {
        if components.is_empty() {
            return Err(DataError::NoSource);
        }
        let (sources, weights): (Vec<_>, Vec<_>) = components.into_iter().unzip();
        let usable = weights.iter().all(|&weight: &f64| weight > 0.0) && weights.iter().sum::<f64>().is_finite();
        if !usable {
            return Err(DataError::Setting { setting: "data.mixture[].weight", must: "a number greater than 0" });
        }
        Ok(Self { sources, schedule: MixtureSchedule::from_weights(&weights) })
    }

    /// Opens the training data of a run: its streaming config, `data.mixture` or `data.train_shards`. `cancel` cancels
    /// the listing, and whatever reads the data on the caller's thread.
    pub fn from_run(run: &ResolvedRun, hub: &HubSettings, cancel: &CancelToken) -> Result<Self, DataError> {
        let data = &run.config.data;
        let version = data.reading_version();
        let streamed = |streaming: &StreamingConfig| {
            let source = DataSource::streaming(streaming, hub.clone().with_run_config(data), version, cancel);
            source.map(|source| with_settings(source, data))
        };
        let local = |patterns: &[String], split: Option<&str>, text_column: &str| {
            let split = FolderSplit::of_training(split);
            let source = DataSource::local_split(patterns, Path::new(""), &split, text_column, version, cancel);
            source.map(|source| with_settings(source, data))
        };
        if let Some(streaming) = &run.streaming {
            return streamed(streaming).map(Self::from);
        }
        if data.mixture.is_empty() && !data.train_shards.is_empty() {
            return local(&data.train_shards, data.split.as_deref(), &data.text_column).map(Self::from);
        }
        let component = |component: &MixtureComponent| {
            let text_column = component.text_column.as_deref().unwrap_or(&data.text_column);
            let source = match &component.dataset {
                None => local(&component.shards, component.split.as_deref(), text_column),
                Some(dataset) => {
                    let streaming = StreamingConfig {
                        config: component.config.clone(),
                        revision: component.revision.clone(),
                        text_column: text_column.to_owned(),
                        ..StreamingConfig::new(dataset, component.split())
                    };
                    streamed(&streaming)
                }
            };
            Ok((source?, component.weight))
        };
        Self::new(data.mixture.iter().map(component).collect::<Result<_, DataError>>()?)
    }

    /// Returns the same sources with other weights.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_weights(&self, weights: impl IntoIterator<Item = f64>) -> Result<Self, DataError> {
        Self::new(self.sources.iter().cloned().zip(weights).collect())
    }

    /// Returns the same data, read as the run of a cursor reads them: see [`Cursor`] of runs that have accepted that files
    /// were added, appended to or removed.
    #[must_use]
    pub fn arranged(&self, cursor: &Cursor) -> Self {
        let positions = self.sources.iter().zip(&cursor.components);
        let sources: Vec<DataSource> = positions.map(|(source, position)| source.arranged(&position.files)).collect();
        // A cursor of another mixture is rejected where its stream is opened.
        if sources.len() == self.sources.len() {
            Self { sources, schedule: self.schedule.clone() }
        } else {
            self.clone()
        }
    }

    /// Takes over what a cursor of a stream with `settings` records of its sources: their held-out rows. They are decided
    /// once for a run, though its files may become corrupted, or be repaired.
    pub fn restore(&self, cursor: &Cursor, settings: &StreamSettings) {
        for (source, position) in self.sources.iter().zip(&cursor.components) {
            if let Some(split) = &position.split {
                source.restore_split(settings.split_settings(), split);
            }
        }
    }

    /// The ledger's records of the corrupted rows that a cursor holds.
    pub fn corrupted_records(&self, cursor: &Cursor) -> Vec<CorruptedRecord> {
        let record = |(component, (source, position)): (usize, (&DataSource, &ComponentPosition))| {
            let of_rows = |rows: &CorruptedRows| {
                let file =
                    source.shards().get(rows.shard as usize).map_or_else(String::new, |shard| shard.name.clone());
                let problem = "found before this ledger starts".to_owned();
                CorruptedRecord::new(component, &FoundCorruption { rows: *rows, file, problem })
            };
            position.corrupted.iter().map(of_rows).collect::<Vec<_>>()
        };
        self.sources.iter().zip(&cursor.components).enumerate().flat_map(record).collect()
    }

    /// The components, in order.
    pub fn sources(&self) -> &[DataSource] {
        &self.sources
    }

    /// The normalised weight of a component, between 0 and 1.
    pub fn weight(&self, component: usize) -> f64 {
        self.schedule.fraction(component)
    }

    /// The name, revision and size of each component.
    pub fn describe(&self) -> Vec<SourceDescription> {
        self.sources.iter().map(DataSource::describe).collect()
    }

    /// Notes on files that were left out of the listings, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        self.sources.iter().flat_map(DataSource::notes).cloned().collect()
    }

    /// Returns the same data; reading it on the caller's thread is cancelled by `cancel`.
    #[must_use]
    pub fn cancelled_by(&self, cancel: &CancelToken) -> Self {
        let sources = self.sources.iter().map(|source| source.cancelled_by(cancel)).collect();
        Self { sources, schedule: self.schedule.clone() }
    }

    /// The token that cancels reading on the caller's thread.
    pub(crate) fn cancel(&self) -> &CancelToken {
        // There is at least one source, and all were opened with the same token.
        self.sources[0].cancel()
    }

    /// The request that has been failing for the longest time; none if all succeed.
    pub fn retry_status(&self) -> Option<RetryStatus> {
        self.sources.iter().filter_map(DataSource::retry_status).min_by_key(|status| status.since)
    }

    pub(crate) fn schedule(&self) -> &MixtureSchedule {
        &self.schedule
    }

    /// Returns how much a window of a component holds if the windows of all components together hold `documents`.
    pub(crate) fn window_budget(&self, component: usize, documents: usize) -> ReadBudget {
        let part = |whole: usize, minimum: usize| {
            ((whole as f64 * self.weight(component)).ceil() as usize).max(minimum.min(whole))
        };
        ReadBudget {
            documents: part(documents, MIN_COMPONENT_WINDOW.documents),
            bytes: part(WINDOW_BYTES, MIN_COMPONENT_WINDOW.bytes),
        }
    }
}

fn with_settings(source: DataSource, data: &DataConfig) -> DataSource {
    source.with_format(data.format).with_bad_files_skipped(data.skips_bad_files())
}

impl From<DataSource> for Mixture {
    fn from(source: DataSource) -> Self {
        Self { sources: vec![source], schedule: MixtureSchedule::from_weights(&[1.0]) }
    }
}

impl From<&DataSource> for Mixture {
    fn from(source: &DataSource) -> Self {
        source.clone().into()
    }
}

impl From<&Self> for Mixture {
    fn from(mixture: &Self) -> Self {
        mixture.clone()
    }
}
