//! Cancellation: the caller passes a [`CancelToken`], which every wait and every long loop of this crate
//! polls.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::DataError;

/// How often a wait polls its token.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for a thread's next message; [`DataError::Interrupted`] soon after `interrupted` is true. No message is lost.
pub(crate) fn receive<T>(
    from: &Receiver<Result<T, DataError>>,
    interrupted: &dyn Fn() -> bool,
) -> Result<T, DataError> {
    let disconnected = || {
        let message = "the data thread ended unexpectedly; this is a bug, please report it";
        DataError::Threads { message: message.to_owned() }
    };
    let check = || if interrupted() { Err(DataError::Interrupted) } else { Ok(()) };
    receive_unless(from, &check, disconnected)?
}

/// Waits for the next message of a channel, unless `check` fails first.
fn receive_unless<T>(
    from: &Receiver<T>,
    check: &dyn Fn() -> Result<(), DataError>,
    disconnected: impl Fn() -> DataError,
) -> Result<T, DataError> {
    loop {
        match from.recv_timeout(POLL_INTERVAL) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Timeout) => check()?,
            Err(RecvTimeoutError::Disconnected) => return Err(disconnected()),
        }
    }
}

/// Cancels work on data. Clones share their state.
#[derive(Clone, Default)]
pub struct CancelToken {
    state: Arc<CancelState>,
    interrupted: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

/// The state that [`CancelToken::cancel`] sets.
#[derive(Default)]
struct CancelState {
    cancelled: AtomicBool,
    /// The mutex of `condition`, held while `cancelled` is set.
    lock: Mutex<()>,
    condition: Condvar,
}

impl CancelToken {
    /// A token that is cancelled only by this crate.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that cancels, with [`DataError::Interrupted`], as long as `interrupted` returns true. It is called
    /// often, from the thread that waits or works.
    pub fn when(interrupted: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { interrupted: Some(Arc::new(interrupted)), ..Self::default() }
    }

    /// Wakes all waiting threads; after this [`Self::check`] fails with [`DataError::Closed`].
    pub(crate) fn cancel(&self) {
        let guard = self.state.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.cancelled.store(true, Ordering::Release);
        drop(guard);
        self.state.condition.notify_all();
    }

    /// Whether the work is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.check().is_err()
    }

    /// Fails if the work is cancelled.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        if self.state.cancelled.load(Ordering::Acquire) {
            return Err(DataError::Closed);
        }
        match &self.interrupted {
            Some(interrupted) if interrupted() => Err(DataError::Interrupted),
            _ => Ok(()),
        }
    }

    /// Sleeps for `duration`; fails as soon as the work is cancelled.
    pub(crate) fn sleep(&self, duration: Duration) -> Result<(), DataError> {
        let deadline = Instant::now() + duration;
        loop {
            self.check()?;
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Ok(());
            }
            let guard = self.state.lock.lock().unwrap_or_else(PoisonError::into_inner);
            let cancelled = || self.state.cancelled.load(Ordering::Acquire);
            drop(self.state.condition.wait_timeout_while(guard, remaining.min(POLL_INTERVAL), |()| !cancelled()));
        }
    }

    /// Runs blocking work on a thread of its own and waits for the result. After cancellation the thread is abandoned
    /// and its result is dropped.
    pub(crate) fn run_blocking<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DataError> {
        self.check()?;
        let (sender, result) = sync_channel(1);
        let failed = |message: String| DataError::Threads { message };
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || sender.send(work()))
            .map_err(|error| failed(error.to_string()))?;
        receive_unless(&result, &|| self.check(), || failed(format!("the thread {name} ended unexpectedly")))
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A token and the flag that interrupts it.
    fn interruptible() -> (CancelToken, Arc<AtomicBool>) {
        let flag = Arc::new(AtomicBool::new(false));
        let flag_copy = Arc::clone(&flag);
        (CancelToken::when(move || flag_copy.load(Ordering::Relaxed)), flag)
    }

    #[test]
    fn sleep_ends_when_interrupted() {
        let (token, flag) = interruptible();
        token.sleep(Duration::ZERO).unwrap();
        let setter = std::thread::spawn(move || flag.store(true, Ordering::Relaxed));
        assert!(matches!(token.sleep(Duration::from_hours(1)), Err(DataError::Interrupted)));
        setter.join().unwrap();
    }

    #[test]
    fn sleep_ends_when_cancelled() {
        let token = CancelToken::new();
        let other = token.clone();
        let setter = std::thread::spawn(move || other.cancel());
        assert!(matches!(token.sleep(Duration::from_hours(1)), Err(DataError::Closed)));
        setter.join().unwrap();
    }

    #[test]
    fn blocking_work_is_abandoned_when_interrupted() {
        let (token, flag) = interruptible();
        let (release, released) = mpsc::channel::<()>();
        let blocking = move || {
            flag.store(true, Ordering::Relaxed);
            released.recv().is_err()
        };
        assert!(matches!(token.run_blocking("test", blocking), Err(DataError::Interrupted)));
        drop(release);
        assert_eq!(CancelToken::new().run_blocking("test", || 3).unwrap(), 3);
    }
}
