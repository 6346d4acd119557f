//! The steps that are logged.

/// Decides which steps are logged: the first, every `log_every_n_steps`th and the last. Metrics and plain progress
/// lines use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogInterval {
    every: u64,
    last_step: Option<u64>,
}

impl LogInterval {
    /// Returns the interval of a run; `last_step` is its final step, if known beforehand.
    pub(crate) fn new(every: u64, last_step: Option<u64>) -> Self {
        Self { every: every.max(1), last_step }
    }

    pub(crate) fn includes(self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.every) || self.last_step == Some(step)
    }
}
