//! Cancelling work on data that takes long, and waiting that can be cancelled.
//!
//! Whoever starts the work gives it a [`CancelToken`]; every wait and every long loop of this crate polls it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::DataError;

/// How often a wait polls its token.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The next message of a thread; gives up soon after `interrupted` says so, and loses nothing by that.
pub(crate) fn receive<T>(
    from: &Receiver<Result<T, DataError>>,
    interrupted: &dyn Fn() -> bool,
) -> Result<T, DataError> {
    let disconnected = || {
        let message = "the data thread broke off; this is a fault of the program, please report it";
        DataError::Threads { message: message.to_owned() }
    };
    let check = || if interrupted() { Err(DataError::Interrupted) } else { Ok(()) };
    receive_unless(from, &check, disconnected)?
}

/// The next message of a channel, unless `check` fails first.
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

/// Tells work on data to end. Clones share it.
#[derive(Clone, Default)]
pub struct CancelToken {
    state: Arc<CancelState>,
    interrupted: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

/// What [`CancelToken::cancel`] sets.
#[derive(Default)]
struct CancelState {
    cancelled: AtomicBool,
    /// Whoever waits for the flag holds it.
    lock: Mutex<()>,
    changed: Condvar,
}

impl CancelToken {
    /// A token that cancels nothing by itself.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that cancels, with [`DataError::Interrupted`], as long as `interrupted` says so. It is polled from the
    /// thread that waits or works, and often.
    pub fn when(interrupted: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { interrupted: Some(Arc::new(interrupted)), ..Self::default() }
    }

    /// Wakes whoever waits; from here on [`Self::check`] fails with [`DataError::Closed`].
    pub(crate) fn cancel(&self) {
        let guard = self.state.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.cancelled.store(true, Ordering::Release);
        drop(guard);
        self.state.changed.notify_all();
    }

    /// Whether the work is no longer wanted.
    pub fn is_cancelled(&self) -> bool {
        self.check().is_err()
    }

    /// Fails when the work is no longer wanted.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        if self.state.cancelled.load(Ordering::Acquire) {
            return Err(DataError::Closed);
        }
        match &self.interrupted {
            Some(interrupted) if interrupted() => Err(DataError::Interrupted),
            _ => Ok(()),
        }
    }

    /// RetryMonitor `duration`, or fails as soon as the work is no longer wanted.
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
            drop(self.state.changed.wait_timeout_while(guard, remaining.min(POLL_INTERVAL), |()| !cancelled()));
        }
    }

    /// Does blocking work on a thread of its own and waits for it. A thread whose work is no longer wanted is left
    /// alone, and what it comes to is dropped.
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
        receive_unless(&result, &|| self.check(), || failed(format!("the thread {name} broke off")))
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

    /// A token and what interrupts it.
    fn interruptible() -> (CancelToken, Arc<AtomicBool>) {
        let flag = Arc::new(AtomicBool::new(false));
        let polled = Arc::clone(&flag);
        (CancelToken::when(move || polled.load(Ordering::Relaxed)), flag)
    }

    #[test]
    fn a_wait_of_hours_ends_when_interrupted() {
        let (token, flag) = interruptible();
        token.sleep(Duration::ZERO).unwrap();
        let setter = std::thread::spawn(move || flag.store(true, Ordering::Relaxed));
        assert!(matches!(token.sleep(Duration::from_hours(1)), Err(DataError::Interrupted)));
        setter.join().unwrap();
    }

    #[test]
    fn a_wait_of_hours_ends_when_cancelled() {
        let token = CancelToken::new();
        let other = token.clone();
        let setter = std::thread::spawn(move || other.cancel());
        assert!(matches!(token.sleep(Duration::from_hours(1)), Err(DataError::Closed)));
        setter.join().unwrap();
    }

    #[test]
    fn blocking_work_is_left_alone_when_interrupted() {
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
