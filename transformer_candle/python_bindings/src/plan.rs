//! The memory plan: what a run needs.

use pyo3::prelude::*;

use crate::arguments::detached;
use crate::config::RunConfig;
use crate::json;
use crate::values::value_class;

value_class! {
    /// What a run needs and gives; prints as `plan` does.
    MemoryPlan(training::memory_plan::MemoryPlan) {
        /// Parameters on disk.
        parameters: u64,
        /// Bytes of all planned buffers.
        bytes: u64,
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

/// Return the GPUs that a run can be planned for: what each holds and how fast it is, by its name for `--gpu`.
#[pyfunction]
pub fn gpu_table(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let entry = |gpu: &training::memory_plan::GpuSpec| {
        let mut entry = serde_json::to_value(gpu).unwrap_or_default();
        entry["bf16_flops"] = gpu.bf16_flops().into();
        (gpu.key.to_owned(), entry)
    };
    let table: serde_json::Map<_, _> = training::memory_plan::GPUS.iter().map(entry).collect();
    json::to_python(py, &table)
}
