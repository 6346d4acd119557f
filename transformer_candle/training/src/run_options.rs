//! What a caller decides about a run besides its config.

use std::{path::PathBuf, sync::Arc};

use run_config::Device;

use crate::{lock::RunLock, progress::ProgressMode};

/// What a caller decides about a run besides its config.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Resume from a checkpoint instead of starting from scratch.
    pub resume: Option<ResumeFrom>,
    /// Resume with the config's micro-batch, accumulation and recompute mode instead of the checkpoint's.
    pub rebatch: bool,
    /// The run directory's lock, where the caller has taken it already.
    pub lock: Option<Arc<RunLock>>,
    /// Leave the run, with a checkpoint, once it has taken this many steps in all. The schedule does not change.
    pub max_steps: Option<u64>,
    /// Instead of `runtime.device`.
    pub device: Option<Device>,
    /// How progress is shown.
    pub progress: ProgressMode,
}

/// Where a run is resumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// At the newest intact checkpoint of the run's folder of checkpoints; at the beginning if none was ever written.
    Latest,
    /// At this checkpoint directory.
    Directory(PathBuf),
}
