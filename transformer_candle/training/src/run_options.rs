//! The options of a run that are not in its config.

use std::{ops::RangeInclusive, path::PathBuf, sync::Arc};

use run_config::{Device, RunConfig};

use crate::{error::Result, lock::RunLock, profile::ProfileSteps, progress::ProgressMode, ranks::Ranks};

/// The options of a run that are not in its config.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Resume from a checkpoint instead of starting from scratch.
    pub resume: Option<ResumeFrom>,
    /// Resume with the config's micro-batch, accumulation and recompute mode instead of the checkpoint's.
    pub rebatch: bool,
    /// Resume though local files have changed that no step has consumed, or whose consumed rows are the same.
    pub accept_changed_data: bool,
    /// The run directory's lock, where the caller has taken it already.
    pub lock: Option<Arc<RunLock>>,
    /// Leave the run, with a checkpoint, once it has taken this many steps in all. The schedule does not change.
    pub max_steps: Option<u64>,
    /// The device to train on, instead of `runtime.device`.
    pub device: Option<Device>,
    /// Profile these steps: write a trace, and a summary of where their time goes.
    pub profile: Option<ProfileSteps>,
    /// How progress is shown.
    pub progress: ProgressMode,
    /// The processes that train the model together.
    pub ranks: Ranks,
}

impl RunOptions {
    /// Returns the last step of the session, if it is known beforehand.
    pub(crate) fn last_step(&self, config: &RunConfig) -> Option<u64> {
        config.scheduler.total_steps.into_iter().chain(self.max_steps).min()
    }

    /// Returns the numbers of the steps to profile, in a session that begins after step `steps_done`.
    ///
    /// # Errors
    /// [`crate::TrainerError::Request`] if the session does not take them.
    pub(crate) fn profiled_steps(&self, config: &RunConfig, steps_done: u64) -> Result<Option<RangeInclusive<u64>>> {
        self.profile.map(|steps| steps.resolve(steps_done, self.last_step(config))).transpose()
    }
}

/// The checkpoint that a run is resumed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// The newest intact checkpoint in the run's folder of checkpoints; if none was ever written, the run starts from
    /// scratch.
    Latest,
    /// The checkpoint in this directory.
    Directory(PathBuf),
}
