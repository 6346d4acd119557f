//! The trainer's commands, run by `orchestrate` through the same declarations and functions.

use std::ffi::OsString;
use std::io;
use std::iter::once;

use pyo3::prelude::*;
use training::TrainerError;
use training::commands::{self, Output};
use training::launcher::Launcher;
use training::stop::StopSignal;

use crate::arguments::CallError;
use crate::errors::raised;
use crate::json;
use crate::lock::RunLock;
use crate::signals::forwarding_signals;

/// Run a command of the trainer's program, and return its exit code: 130 or 143 if Ctrl-C or SIGTERM stopped a training
/// run that was saved.
#[pyfunction]
#[pyo3(signature = (words, write, is_terminal = false, lock = None))]
pub fn run_command(
    py: Python<'_>,
    words: Vec<OsString>,
    write: Py<PyAny>,
    is_terminal: bool,
    lock: Option<&RunLock>,
) -> PyResult<u8> {
    let words = once(OsString::from("orchestrate")).chain(words);
    let lock = lock.and_then(RunLock::shared);
    let mut output = Stream { write, is_terminal };
    let stop = StopSignal::new();
    exit_code(py, &stop, || commands::run(words, lock, &mut output, &stop))
}

/// Runs a command to its exit code. A stop raises no exception: the exit code or the error reports it.
pub fn exit_code(
    py: Python<'_>,
    stop: &StopSignal,
    command: impl FnOnce() -> training::Result<u8> + Send,
) -> PyResult<u8> {
    let _save_requests = stop.listen_for_save_requests()?;
    let (outcome, _) = forwarding_signals(py, stop, command);
    match (outcome, stop.requested()) {
        (Err(CallError::Error(error)), Some(signal)) if error.is_interruption() => {
            Err(raised(TrainerError::Interrupted(signal)))
        }
        (outcome, _) => Ok(outcome?),
    }
}

/// Return what each command of the trainer's program takes, as its command line declares it.
#[pyfunction]
pub fn declared_commands(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    json::to_python(py, &commands::declared())
}

/// Let the system send this process SIGTERM when `orchestrate`, which launched it, ends. Returns False if it has ended
/// already.
#[pyfunction]
pub fn stop_with_launcher() -> bool {
    let stop = StopSignal::new();
    if let Some(launcher) = Launcher::from_environment() {
        launcher.stop_with_it(&stop);
    }
    stop.requested().is_none()
}

/// A Python function that writes text and raises an `OSError` on failure.
struct Stream {
    write: Py<PyAny>,
    is_terminal: bool,
}

impl Output for Stream {
    fn write(&mut self, text: &str) -> io::Result<()> {
        Python::attach(|py| self.write.call1(py, (text,)).map(drop).map_err(|error| io_error(py, error)))
    }

    fn is_terminal(&self) -> bool {
        self.is_terminal
    }
}

fn io_error(py: Python<'_>, error: PyErr) -> io::Error {
    let number = error.value(py).getattr("errno").and_then(|number| number.extract());
    number.map_or_else(|_| error.into(), io::Error::from_raw_os_error)
}
