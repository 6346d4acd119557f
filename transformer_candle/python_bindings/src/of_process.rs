//! Values whose threads a forked child does not have.

use std::{mem, process};

use pyo3::PyResult;

use crate::errors::TrainerError;

/// A value that only the process that made it can use. In a child, waiting for one of its threads would never end: not even
/// dropping it is tried there.
pub struct OfProcess<T> {
    /// None only while it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T> OfProcess<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// The value, where it is used without its threads.
    pub fn unthreaded(&mut self) -> &mut T {
        self.value.as_mut().expect("the value is there until it is dropped")
    }

    /// The value, unless this process is a child of the one that made it.
    pub fn usable(&mut self, name: &str) -> PyResult<&mut T> {
        let (made_in, here) = (self.process, process::id());
        if made_in != here {
            return Err(TrainerError::new_err(format!(
                "this {name} was made by process {made_in}, and process {here}, forked from it, has none of its threads: \
                 make a {name} of its own there, or start the process with the method `spawn`"
            )));
        }
        Ok(self.unthreaded())
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            mem::forget(self.value.take());
        }
    }
}
