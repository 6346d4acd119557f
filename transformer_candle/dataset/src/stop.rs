//! A word to the threads that read and prepare data: end now. And waiting for them, which can be interrupted.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::DataError;

/// How often whoever waits for data looks whether it is still wanted.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// What a thread sends next; gives up soon after `interrupted` says so, and loses nothing by that.
pub(crate) fn receive<T>(
    from: &Receiver<Result<T, DataError>>,
    interrupted: &dyn Fn() -> bool,
) -> Result<T, DataError> {
    loop {
        match from.recv_timeout(BETWEEN_LOOKS) {
            Ok(message) => return message,
            Err(RecvTimeoutError::Timeout) if interrupted() => return Err(DataError::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the data thread broke off; this is a fault of the program, please report it";
                return Err(DataError::Threads { message: message.to_owned() });
            }
        }
    }
}

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
