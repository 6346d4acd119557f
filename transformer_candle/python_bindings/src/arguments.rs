//! Conversion of Python's arguments, and calls into Rust with panics caught and the GIL released.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use training::TrainerError as RustTrainerError;

use crate::errors::{TrainerError, raised};

/// An integer argument. Out of range it raises a `ValueError` that states the range, which `PyO3`'s `OverflowError`
/// does not.
#[derive(Clone, Copy)]
pub struct Integer<T>(pub T);

/// An integer type with its limits.
pub trait Bounded: Display {
    /// The smallest value.
    const MIN: Self;
    /// The largest value.
    const MAX: Self;
}

macro_rules! bounded {
    ($($integer:ty),*) => {
        $(impl Bounded for $integer {
            const MIN: Self = <$integer>::MIN;
            const MAX: Self = <$integer>::MAX;
        })*
    };
}
bounded!(u32, u64, usize);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Integer<T>
where
    T: Bounded + FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        argument.extract::<T>().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyOverflowError>(argument.py()) {
                return error;
            }
            let (min, max) = (T::MIN, T::MAX);
            PyValueError::new_err(format!("an integer is out of range: it must be from {min} to {max}"))
        })
    }
}

/// Extracts an argument of a plain type as [`Integer`] does, by `from_py_with = integer`; so its signature can show a
/// default.
pub fn integer<'py, T>(argument: &Bound<'py, PyAny>) -> PyResult<T>
where
    Integer<T>: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    argument.extract::<Integer<T>>().map(|integer| integer.0)
}

/// Runs `work`, with errors and panics (bugs) as a [`CallError`].
pub fn caught<T, E: Into<RustTrainerError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, CallError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| CallError::Error(Box::new(error.into()))),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().map(String::as_str);
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(CallError::Panic(reason.to_owned()))
        }
    }
}

/// Why a call from Python failed.
pub enum CallError {
    /// An error of the trainer.
    Error(Box<RustTrainerError>),
    /// A panic, which is a bug, with its message.
    Panic(String),
}

impl From<CallError> for PyErr {
    fn from(failure: CallError) -> Self {
        match failure {
            CallError::Error(error) => raised(*error),
            CallError::Panic(reason) => TrainerError::new_err(format!(
                "internal error: {reason}. This is a bug in transformer_candle; please report it"
            )),
        }
    }
}

/// Runs `work` without the GIL.
pub fn detached<T, E>(py: Python<'_>, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<RustTrainerError>,
{
    Ok(py.detach(|| caught(work))?)
}
