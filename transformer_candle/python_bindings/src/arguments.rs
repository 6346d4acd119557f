//! Arguments as Python hands them over, and the way from there into Rust and back.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use training::TrainerError as RustTrainerError;

use crate::errors::{TrainerError, raised};

/// An integer that one of Rust's types holds. Others raise a `ValueError` that says what is possible, as the `OverflowError` of
/// `PyO3` does not.
#[derive(Clone, Copy)]
pub struct Integer<T>(pub T);

/// The range of an integer type.
pub trait Range: Display {
    /// The least.
    const LEAST: Self;
    /// The most.
    const MOST: Self;
}

macro_rules! range {
    ($($integer:ty),*) => {
        $(impl Range for $integer {
            const LEAST: Self = Self::MIN;
            const MOST: Self = Self::MAX;
        })*
    };
}
range!(u32, u64, usize);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Integer<T>
where
    T: Range + FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        argument.extract::<T>().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyOverflowError>(argument.py()) {
                return error;
            }
            let (least, most) = (T::LEAST, T::MOST);
            PyValueError::new_err(format!("an integer is out of range: it must be from {least} to {most}"))
        })
    }
}

/// The same for an argument with a default, which a signature shows only of plain types: `from_py_with = integer`.
pub fn integer<'py, T>(argument: &Bound<'py, PyAny>) -> PyResult<T>
where
    Integer<T>: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    argument.extract::<Integer<T>>().map(|integer| integer.0)
}

/// Works; a panic, which is a bug, becomes an error too.
pub fn caught<T, E: Into<RustTrainerError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|error| Failure::Error(Box::new(error.into()))),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().map(String::as_str);
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(Failure::Panic(reason.to_owned()))
        }
    }
}

/// Why a call ends without a value.
pub enum Failure {
    /// As the trainer says.
    Error(Box<RustTrainerError>),
    /// A bug, with its message.
    Panic(String),
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Error(error) => raised(*error),
            Failure::Panic(reason) => TrainerError::new_err(format!(
                "internal error: {reason}. This is a bug in transformer_candle; please report it"
            )),
        }
    }
}

/// Works without the GIL.
pub fn detached<T, E>(py: Python<'_>, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<RustTrainerError>,
{
    Ok(py.detach(|| caught(work))?)
}
