//! The state of a GPU that its speed depends on: clocks, power, other processes.

use pyo3::prelude::*;

use crate::arguments::detached;
use crate::json::to_python;

/// What NVML reports of the GPU with this UUID (`Gpu.uuid`), as a dictionary; None for what the GPU does not support.
#[pyfunction]
pub fn gpu_state<'py>(py: Python<'py>, uuid: &str) -> PyResult<Bound<'py, PyAny>> {
    let state = detached(py, || training::gpu_state::gpu_state(uuid))?;
    to_python(py, &state)
}
