//! The interface of a metrics sink.

use std::{fmt::Debug, path::Path};

use crate::{Result, report::Record};

/// Receives a run's records in step order. A record has left the process when the call returns, so that a kill loses
/// nothing; only records that a full disk refuses are buffered.
pub(super) trait MetricsSink: Debug + Send {
    /// Opens the sink of the run in `run_directory` at its file or folder. `rewind_to` keeps what was recorded up to
    /// that step, for a resume; without it the sink starts empty.
    fn open(path: &Path, run_directory: &Path, rewind_to: Option<u64>) -> Result<Self>
    where
        Self: Sized;

    /// Appends a record.
    fn record(&mut self, record: &Record);

    /// Makes everything recorded durable, as far as the disk has space.
    fn flush(&mut self);

    /// Returns notes for the user since the last call, one sentence each.
    fn take_notices(&mut self) -> Vec<String>;
}
