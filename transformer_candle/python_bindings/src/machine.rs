//! The capabilities of this machine and this build, for `orchestrate doctor` and for the choice of a preset.

use pyo3::prelude::*;
use run_config::{Device, NumWorkers, TimeSpan};
use serde_json::json;
use training::environment::Environment;
use training::profile::ProfileSteps;

use crate::arguments::{Integer, detached};
use crate::errors::{ConfigError, raised};
use crate::json::to_python;

/// An NVIDIA GPU, as the driver lists it.
#[pyclass(frozen, get_all, module = "orchestrator._native")]
pub struct Gpu {
    /// Its number, as in `cuda:0`.
    ordinal: usize,
    /// As the driver calls it.
    name: String,
    /// As `nvidia-smi -L` writes it.
    uuid: String,
    /// Its memory.
    total_bytes: u64,
    /// Major and minor.
    compute_capability: (u32, u32),
    /// Why nothing is trained on it, in a sentence; None where it can be.
    refusal: Option<String>,
}

/// The GPUs that the driver lists, those that this build cannot train on among them. None is opened.
#[pyfunction]
pub fn gpus(py: Python<'_>) -> PyResult<Vec<Gpu>> {
    let devices = py.detach(training::device::gpus).map_err(ConfigError::new_err)?;
    let gpus = devices.into_iter().map(|gpu| Gpu {
        refusal: gpu.refusal(),
        ordinal: gpu.ordinal,
        name: gpu.name,
        uuid: gpu.uuid,
        total_bytes: gpu.total_bytes,
        compute_capability: gpu.compute_capability,
    });
    Ok(gpus.collect())
}

/// Open a device as a run would, and tell what it is and what of its memory is free.
#[pyfunction]
pub fn open_device<'py>(py: Python<'py>, device: &str) -> PyResult<Bound<'py, PyAny>> {
    let requested_device = device_of(device)?;
    let opened = detached(py, || training::device::open(requested_device))?;
    let Some(gpu) = opened.as_cuda() else {
        return to_python(py, &json!({"device": opened.to_string()}));
    };
    let memory = gpu.memory().map_err(raised)?;
    let description = json!({
        "device": opened.to_string(),
        "name": gpu.name(),
        "compute_capability": gpu.compute_capability(),
        "free_bytes": memory.free,
        "total_bytes": memory.total,
        "software": gpu.fingerprint(),
    });
    to_python(py, &description)
}

/// Parses an argument that names a device: `auto`, `cpu`, `cuda` or `cuda:N`.
pub fn device_of(argument: &str) -> PyResult<Device> {
    argument.parse().map_err(|problem| ConfigError::new_err(format!("the device is {argument:?}, but {problem}")))
}

/// Refuse more threads than this machine can use or the system starts: `threads`, else `RAYON_NUM_THREADS`, and
/// `workers` that read, a number or `auto`.
#[pyfunction]
pub fn check_threads(
    py: Python<'_>,
    threads: Option<Integer<usize>>,
    #[pyo3(from_py_with = workers)] workers: NumWorkers,
) -> PyResult<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    detached(py, || training::pool::check(threads.map(|threads| threads.0), workers.at_most(cores)))
}

/// Refuse `--profile` steps that are none, or that a new run of so many steps does not take.
#[pyfunction]
pub fn check_profile(steps: &str, total_steps: Option<Integer<u64>>) -> PyResult<()> {
    let parsed: Result<ProfileSteps, String> = steps.parse();
    let steps = parsed.map_err(|problem| ConfigError::new_err(format!("--profile {steps} {problem}")))?;
    steps.resolve(0, total_steps.map(|steps| steps.0)).map(drop).map_err(raised)
}

/// Refuse a number of ranks that cannot share the sequences of a step equally.
#[pyfunction]
pub fn check_sequences(sequences: Integer<usize>, ranks: Integer<usize>) -> PyResult<()> {
    training::memory_plan::check_sequences(sequences.0, ranks.0).map_err(raised)
}

/// Refuse a `--time-limit` that is not a span of time.
#[pyfunction]
pub fn check_time_limit(limit: &str) -> PyResult<()> {
    let parsed: Result<TimeSpan, String> = limit.parse();
    parsed.map(drop).map_err(|problem| ConfigError::new_err(format!("--time-limit {limit} {problem}")))
}

/// Parses an argument as a config's `data.num_workers`: a number or `auto`.
fn workers(argument: &Bound<'_, PyAny>) -> PyResult<NumWorkers> {
    let text = argument.str()?.to_string();
    text.parse().map_err(|problem| ConfigError::new_err(format!("data.num_workers is {text}, but {problem}")))
}

/// What this build is and what it runs on, as environment.json has it.
#[pyfunction]
pub fn environment(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    to_python(py, &Environment::capture(threads))
}
