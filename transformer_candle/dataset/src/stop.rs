//! A word to the threads that read and prepare data: end now.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::DataError;

/// Shared by a stream and everything that works or waits for it.
#[derive(Clone, Default)]
pub(crate) struct Stop {
    state: Arc<(Mutex<bool>, Condvar)>,
}

impl Stop {
    /// Wakes whoever waits; from here on [`Self::check`] fails.
    pub(crate) fn order(&self) {
        *self.state.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.state.1.notify_all();
    }

    /// Fails when the work is no longer wanted.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        let stopped = *self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        if stopped { Err(DataError::Closed) } else { Ok(()) }
    }

    /// Waits `duration`, or fails as soon as the work is no longer wanted.
    pub(crate) fn wait(&self, duration: Duration) -> Result<(), DataError> {
        let stopped = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.state.1.wait_timeout_while(stopped, duration, |stopped| !*stopped);
        let stopped = *waited.unwrap_or_else(PoisonError::into_inner).0;
        if stopped { Err(DataError::Closed) } else { Ok(()) }
    }
}
