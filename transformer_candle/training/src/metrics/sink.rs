//! The interface of a metrics sink.

use std::{fmt::Debug, path::Path};

use crate::{Result, report::Record};

/// Takes a run's records in the order of its steps. A record has left the process when the call returns, so that a kill loses
/// nothing; only what a full disk does not take waits for room.
pub(super) trait MetricsSink: Debug + Send {
    /// Opens the sink of a run at its file or folder. `rewind_to` keeps what was recorded up to that step, for a resume; without it
    /// the sink starts empty.
    fn open(path: &Path, run: &str, rewind_to: Option<u64>) -> Result<Self>
    where
        Self: Sized;

    /// Appends a record.
    fn record(&mut self, record: &Record);

    /// Makes everything recorded durable, as far as the disk takes it.
    fn flush(&mut self);

    /// What a person should know since this was last asked, one sentence each.
    fn take_notices(&mut self) -> Vec<String>;
}
