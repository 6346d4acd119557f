//! Conversion between values of Serde and plain Python values, by way of JSON text.

use pyo3::exceptions::{PyRecursionError, PyValueError};
use pyo3::prelude::*;
use serde::{Serialize, de::DeserializeOwned};

/// Converts a value to dicts, lists, numbers and strings.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// Converts dicts, lists, numbers and strings to a value.
pub fn from_python<T: DeserializeOwned>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    let json_text = value.py().import("json")?.call_method1("dumps", (value,)).map_err(|error| {
        let too_deep = error.is_instance_of::<PyRecursionError>(value.py());
        if too_deep { PyValueError::new_err("a value is nested too deeply") } else { error }
    })?;
    let text: String = json_text.extract()?;
    serde_json::from_str(&text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Converts an f32 to the f64 that Python reads from metrics.jsonl: that of its shortest decimal, not its exact value.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::NAN)
}
