//! The memory plan: what a run needs.

use pyo3::prelude::*;

use crate::arguments::detached;
use crate::config::RunConfig;
use crate::json;

/// What a run needs and gives; prints as `plan` does.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct MemoryPlan(training::memory_plan::MemoryPlan);

impl From<training::memory_plan::MemoryPlan> for MemoryPlan {
    fn from(plan: training::memory_plan::MemoryPlan) -> Self {
        Self(plan)
    }
}

#[pymethods]
impl MemoryPlan {
    /// Parameters on disk.
    #[getter]
    fn parameters(&self) -> u64 {
        self.0.parameters
    }

    /// Bytes of all planned buffers.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Everything as plain values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        json::to_python(py, &self.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("MemoryPlan({} parameters, {} bytes)", self.0.parameters, self.0.bytes)
    }
}

/// Return what a run needs in memory, disk and arithmetic, before anything is allocated.
#[pyfunction]
pub fn memory_plan(py: Python<'_>, config: &RunConfig) -> PyResult<MemoryPlan> {
    detached(py, || training::memory_plan::MemoryPlan::new(&config.0)).map(MemoryPlan)
}
