//! Guards values with threads of their own against use in a forked child.

use std::{mem, process};

use pyo3::PyResult;

use crate::errors::TrainerError;

/// A value that only the process that created it can use. A forked child has none of its threads, so waiting for one
/// would never end: there, the value is not even dropped.
pub struct ProcessOwned<T> {
    /// `None` only while dropping.
    value: Option<T>,
    process: u32,
}

impl<T> ProcessOwned<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// Returns the value, for uses that need none of its threads.
    pub fn unthreaded(&mut self) -> &mut T {
        self.value.as_mut().expect("the value exists until it is dropped")
    }

    /// Returns the value; fails in a process forked from the one that created it, with `name` as the value's in the
    /// message.
    pub fn usable(&mut self, name: &str) -> PyResult<&mut T> {
        let (creator, here) = (self.process, process::id());
        if creator != here {
            return Err(TrainerError::new_err(format!(
                "this {name} was made by process {creator}, and process {here}, forked from it, has none of its threads: \
                 make a {name} of its own there, or start the process with the method `spawn`"
            )));
        }
        Ok(self.unthreaded())
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            mem::forget(self.value.take());
        }
    }
}
