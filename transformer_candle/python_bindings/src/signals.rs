//! Python's signals while Rust works: what a handler raises ends the work and comes out of the call.

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
use training::stop::{Signal, StopSignal};

use crate::arguments::{Failure, caught, detached};

/// How often signals are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What the work of a call waits for, if it does.
type FindWaiting = Box<dyn Fn() -> Option<RetryStatus> + Send + Sync>;

/// Signals as seen by work that polls a [`CancelToken`] on the thread that called. Clones share it.
#[derive(Clone, Default)]
pub struct Signals(Arc<State>);

#[derive(Default)]
struct State {
    /// What a handler raised.
    raised: Mutex<Option<PyErr>>,
    /// The thread in [`Signals::run`]: no other one may wait for the interpreter, which may be ending.
    caller: Mutex<Option<ThreadId>>,
    polled: Mutex<Option<Instant>>,
    waits: Option<Waits>,
}

/// Who hears what the work waits for.
struct Waits {
    find: FindWaiting,
    messages: WaitMessages,
    on_wait: Py<PyAny>,
}

impl Signals {
    /// `on_wait`, where there is one, is called with a line about what the work waits for.
    pub fn telling(on_wait: Option<Py<PyAny>>, find: impl Fn() -> Option<RetryStatus> + Send + Sync + 'static) -> Self {
        let waits = on_wait.map(|on_wait| Waits { find: Box::new(find), messages: WaitMessages::default(), on_wait });
        Self(Arc::new(State { waits, ..State::default() }))
    }

    /// What the work polls.
    pub fn cancel_token(&self) -> CancelToken {
        let signals = self.clone();
        CancelToken::when(move || signals.are_raised())
    }

    /// Works without the GIL, on this thread.
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
            let heard = Python::attach(|py| self.hear(py));
            if let Err(error) = heard {
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

    fn hear(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        let line = self.0.waits.as_ref().and_then(|waits| Some((waits, waits.messages.line((waits.find)().as_ref())?)));
        if let Some((waits, line)) = line {
            waits.on_wait.call1(py, (line,))?;
        }
        Ok(())
    }
}

/// Works on a thread of its own while this one, where Python delivers signals, hands them on to the stop flag. What a
/// handler raised comes beside the result.
pub fn listening<T: Send>(
    py: Python<'_>,
    stop: &StopSignal,
    work: impl FnOnce() -> training::Result<T> + Send,
) -> (Result<T, Failure>, Option<PyErr>) {
    let mut interrupted = None;
    let listen = || {
        thread::scope(|scope| {
            let (sender, done) = sync_channel::<()>(0);
            let work = move || {
                let _until_dropped = sender;
                caught(work)
            };
            let worker = match thread::Builder::new().spawn_scoped(scope, work) {
                Ok(worker) => worker,
                Err(error) => return Err(Failure::Error(Box::new(not_started(&error)))),
            };
            while done.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                Python::attach(|py| {
                    if let Err(error) = py.check_signals() {
                        stop.request(signal_of(py, &error));
                        interrupted = Some(error);
                    }
                });
            }
            worker.join().unwrap_or_else(|_| Err(Failure::Panic("a panic in a panic".to_owned())))
        })
    };
    let result = py.detach(listen);
    (result, interrupted)
}

/// The signal whose handler raised this: Ctrl-C's raises `KeyboardInterrupt`, or what has its exit code as `code`.
fn signal_of(py: Python<'_>, raised: &PyErr) -> Signal {
    let code = raised.value(py).getattr("code").and_then(|code| code.extract::<u8>());
    let is_interrupt = code.is_ok_and(|code| code == Signal::Interrupt.exit_code());
    if is_interrupt || raised.is_instance_of::<PyKeyboardInterrupt>(py) { Signal::Interrupt } else { Signal::Terminate }
}

/// Works as [`listening`] does and raises what a handler raised.
pub fn interruptible<T: Send>(
    py: Python<'_>,
    stop: &StopSignal,
    work: impl FnOnce() -> training::Result<T> + Send,
) -> PyResult<T> {
    py.check_signals()?;
    let (result, interrupted) = listening(py, stop, work);
    stop.clear();
    interrupted.map_or_else(|| Ok(result?), Err)
}

fn not_started(error: &io::Error) -> TrainerError {
    TrainerError::Request(format!(
        "the system does not start a thread to work on: {error}. Raise the limit of processes (ulimit -u)"
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
