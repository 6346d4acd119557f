//! The run directory's lock, for a process that writes into it before the trainer does.

use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use training::lock;

use crate::errors::raised;

/// The lock of a run directory, held from its making until the `with` block ends or `release` is called.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct RunLock(Mutex<Option<Arc<lock::RunLock>>>);

impl RunLock {
    /// Returns the lock, for the trainer to hold as well; None once it is released.
    pub fn shared(&self) -> Option<Arc<lock::RunLock>> {
        self.held().clone()
    }

    fn held(&self) -> MutexGuard<'_, Option<Arc<lock::RunLock>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl RunLock {
    /// Take the lock of a run's folder, which is created if it does not exist.
    #[new]
    fn new(run: PathBuf) -> PyResult<Self> {
        let lock = lock::RunLock::acquire(&run).map_err(raised)?;
        Ok(Self(Mutex::new(Some(Arc::new(lock)))))
    }

    /// Return the locked file's descriptor: a trainer that gets it as standard input holds the lock as well.
    fn fileno(&self) -> PyResult<RawFd> {
        let released = || pyo3::exceptions::PyValueError::new_err("the lock is released");
        self.held().as_ref().map(AsRawFd::as_raw_fd).ok_or_else(released)
    }

    /// Give it up; a trainer that holds it as well keeps it.
    fn release(&self) {
        self.held().take();
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __exit__(&self, _kind: Option<Py<PyAny>>, _value: Option<Py<PyAny>>, _traceback: Option<Py<PyAny>>) {
        self.release();
    }
}
