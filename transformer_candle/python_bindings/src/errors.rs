//! Rust's errors as Python's exceptions, each with the exit code that the commands give it.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use training::TrainerError as RustTrainerError;
use training::error::ExitCode;

create_exception!(
    orchestrator._native,
    TrainerError,
    PyException,
    "Why a run cannot start, cannot continue, or had to end."
);
create_exception!(
    orchestrator._native,
    ConfigError,
    TrainerError,
    "The config, or what it asks of this machine, is wrong."
);
create_exception!(orchestrator._native, DataError, TrainerError, "The data cannot be read.");
create_exception!(orchestrator._native, CheckpointError, TrainerError, "A checkpoint cannot be saved, found or read.");
create_exception!(
    orchestrator._native,
    OutOfMemoryError,
    TrainerError,
    "The run does not fit in memory; nothing was allocated."
);
create_exception!(orchestrator._native, DivergenceError, TrainerError, "Training diverged past the guard.");

/// Adds the exceptions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for (name, exception, exit_code) in [
        ("TrainerError", py.get_type::<TrainerError>(), ExitCode::Unexpected),
        ("ConfigError", py.get_type::<ConfigError>(), ExitCode::WrongRequest),
        ("DataError", py.get_type::<DataError>(), ExitCode::DataUnreadable),
        ("OutOfMemoryError", py.get_type::<OutOfMemoryError>(), ExitCode::OutOfMemory),
        ("CheckpointError", py.get_type::<CheckpointError>(), ExitCode::CheckpointCorrupted),
        ("DivergenceError", py.get_type::<DivergenceError>(), ExitCode::Diverged),
    ] {
        exception.setattr("exit_code", exit_code as u8)?;
        module.add(name, exception)?;
    }
    Ok(())
}

/// Returns the exception for an error of any crate.
pub fn raised(error: impl Into<RustTrainerError>) -> PyErr {
    let error = error.into();
    let (message, exit_code) = (error.to_string(), error.exit_code());
    let exception = match (error, exit_code) {
        (RustTrainerError::Checkpoint(_), _) => CheckpointError::new_err(message),
        (_, 2) => ConfigError::new_err(message),
        (_, 3) => DataError::new_err(message),
        (_, 4) => OutOfMemoryError::new_err(message),
        (_, 6) => DivergenceError::new_err(message),
        _ => TrainerError::new_err(message),
    };
    Python::attach(|py| {
        exception.value(py).setattr("exit_code", exit_code).map_or_else(|error| error, |()| exception.clone_ref(py))
    })
}
