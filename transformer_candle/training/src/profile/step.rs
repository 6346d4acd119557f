//! A step while it is profiled.

use std::{ops::Range, time::Duration};

use kernels::timing::Recording;

/// Everything of a step, from its start to the start of the next one. Times are since the profile's origin.
#[derive(Clone, Debug, Default)]
pub(super) struct ProfiledStep {
    /// The number of the step, from 1.
    pub(super) number: u64,
    /// Start and end.
    pub(super) time: Range<Duration>,
    /// What the loop did besides computing: names and times.
    pub(super) spans: Vec<(&'static str, Range<Duration>)>,
    /// Sequences that were trained on.
    pub(super) sequences: usize,
    /// The recorded operations.
    pub(super) recording: Recording,
}
