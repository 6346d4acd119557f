//! Python's signals during long calls: an exception raised by a signal handler cancels the work and is raised by the
//! call.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use dataset::CancelToken;
use dataset::hub::RetryStatus;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use training::TrainerError;
use training::progress::WaitMessages;
use training::stop::{StopReason, StopSignal};

use crate::arguments::{CallError, caught, detached};

/// How often signals are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the retry that the work of a call is waiting for, if any.
type FindRetry = Box<dyn Fn() -> Option<RetryStatus> + Send + Sync>;

/// Python's signals during work that polls a [`CancelToken`] on the calling thread. Clones share their state.
#[derive(Clone, Default)]
pub struct Signals(Arc<State>);

#[derive(Default)]
struct State {
    /// The exception that a handler raised.
    raised: Mutex<Option<PyErr>>,
    /// The thread in [`Signals::run`]: no other thread may wait for the interpreter, which may be shutting down.
    caller: Mutex<Option<ThreadId>>,
    polled: Mutex<Option<Instant>>,
    waits: Option<RetryCallback>,
}

/// The callback that retries are reported to.
struct RetryCallback {
    find: FindRetry,
    messages: WaitMessages,
    on_wait: Py<PyAny>,
}

impl Signals {
    /// Returns signals that call `on_wait`, if given, with one line about each retry of the work, which `find` returns.
    pub fn with_callback(
        on_wait: Option<Py<PyAny>>,
        find: impl Fn() -> Option<RetryStatus> + Send + Sync + 'static,
    ) -> Self {
        let waits =
            on_wait.map(|on_wait| RetryCallback { find: Box::new(find), messages: WaitMessages::default(), on_wait });
        Self(Arc::new(State { waits, ..State::default() }))
    }

    /// Returns the token that the work polls.
    pub fn cancel_token(&self) -> CancelToken {
        let signals = self.clone();
        CancelToken::when(move || signals.are_raised())
    }

    /// Runs `work` without the GIL, on this thread.
    pub fn run<T: Send, E: Into<TrainerError> + Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> Result<T, E> + Send,
    ) -> PyResult<T> {
        py.check_signals()?;
        *lock(&self.0.caller) = Some(thread::current().id());
        let result = detached(py, work);
        *lock(&self.0.caller) = None;
        let interrupted = lock(&self.0.raised).take();
        interrupted.map_or(result, Err)
    }

    fn are_raised(&self) -> bool {
        if self.is_due() {
            let polled = Python::attach(|py| self.poll(py));
            if let Err(error) = polled {
                *lock(&self.0.raised) = Some(error);
            }
        }
        lock(&self.0.raised).is_some()
    }

    fn is_due(&self) -> bool {
        let mut polled = lock(&self.0.polled);
        let due = polled.is_none_or(|polled| polled.elapsed() >= POLL_INTERVAL)
            && *lock(&self.0.caller) == Some(thread::current().id())
            && lock(&self.0.raised).is_none();
        if due {
            *polled = Some(Instant::now());
        }
        due
    }

    fn poll(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        let line = self.0.waits.as_ref().and_then(|waits| Some((waits, waits.messages.line((waits.find)().as_ref())?)));
        if let Some((waits, line)) = line {
            waits.on_wait.call1(py, (line,))?;
        }
        Ok(())
    }
}

/// Runs `work` on another thread while this one, where Python delivers signals, forwards them to the stop signal.
/// Returns the result and the exception that a handler raised.
pub fn forwarding_signals<T: Send>(
    py: Python<'_>,
    stop: &StopSignal,
    work: impl FnOnce() -> training::Result<T> + Send,
) -> (Result<T, CallError>, Option<PyErr>) {
    let mut interrupted = None;
    let wait = || {
        thread::scope(|scope| {
            let (sender, end_signal) = sync_channel::<()>(0);
            let work = move || {
                let _dropped_at_the_end = sender;
                caught(work)
            };
            let worker = match thread::Builder::new().spawn_scoped(scope, work) {
                Ok(worker) => worker,
                Err(error) => return Err(CallError::Error(Box::new(not_started(&error)))),
            };
            while end_signal.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                Python::attach(|py| {
                    if let Err(error) = py.check_signals() {
                        stop.request(signal_of(py, &error));
                        interrupted = Some(error);
                    }
                });
            }
            worker.join().unwrap_or_else(|_| Err(CallError::Panic("a panic in a panic".to_owned())))
        })
    };
    let result = py.detach(wait);
    (result, interrupted)
}

/// Returns the signal whose handler raised this exception: the one whose name is its `signal`; Ctrl-C for a
/// `KeyboardInterrupt` and where its `code` is Ctrl-C's exit code; SIGTERM for any other.
fn signal_of(py: Python<'_>, raised: &PyErr) -> StopReason {
    let name = raised.value(py).getattr("signal").and_then(|name| name.extract::<String>());
    if let Some(reason) = name.ok().and_then(|name| StopReason::named(&name)) {
        return reason;
    }
    let code = raised.value(py).getattr("code").and_then(|code| code.extract::<u8>());
    let is_interrupt = code.is_ok_and(|code| code == StopReason::Interrupt.exit_code());
    if is_interrupt || raised.is_instance_of::<PyKeyboardInterrupt>(py) {
        StopReason::Interrupt
    } else {
        StopReason::Terminate
    }
}

/// Runs `work` as [`forwarding_signals`] does, and raises the exception of a handler instead of returning it.
pub fn interruptible<T: Send>(
    py: Python<'_>,
    stop: &StopSignal,
    work: impl FnOnce() -> training::Result<T> + Send,
) -> PyResult<T> {
    py.check_signals()?;
    let (result, interrupted) = forwarding_signals(py, stop, work);
    stop.clear();
    interrupted.map_or_else(|| Ok(result?), Err)
}

/// Runs work that a signal stops, as [`interruptible`] does, with a stop signal of its own.
pub fn stoppable<T: Send>(py: Python<'_>, work: impl FnOnce(&StopSignal) -> training::Result<T> + Send) -> PyResult<T> {
    let stop = StopSignal::new();
    interruptible(py, &stop, || work(&stop))
}

fn not_started(error: &io::Error) -> TrainerError {
    TrainerError::Request(format!(
        "the system cannot start a thread: {error}. Raise the limit of processes (ulimit -u)"
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
