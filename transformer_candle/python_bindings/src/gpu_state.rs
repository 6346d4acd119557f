//! What a GPU's speed depends on besides the program: what NVML, the driver's management library, says of its state.

use std::cmp::Reverse;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use pyo3::prelude::*;
use serde_json::{Value, json};
use training::TrainerError;

use crate::arguments::detached;
use crate::json::to_python;

/// NVML's names of what may keep the clocks below what they could be.
const SLOWDOWNS: [(ThrottleReasons, &str); 8] = [
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "applications_clocks_setting"),
    (ThrottleReasons::SW_POWER_CAP, "sw_power_cap"),
    (ThrottleReasons::HW_SLOWDOWN, "hw_slowdown"),
    (ThrottleReasons::SYNC_BOOST, "sync_boost"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "sw_thermal_slowdown"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hw_thermal_slowdown"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "hw_power_brake_slowdown"),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display_clock_setting"),
];

/// What NVML says of the GPU with this UUID (`Gpu.uuid`), as a dictionary; None for what the GPU does not tell. The
/// library is opened at run time and only here.
#[pyfunction]
pub fn gpu_state<'py>(py: Python<'py>, uuid: &str) -> PyResult<Bound<'py, PyAny>> {
    let state = detached(py, || state_of(uuid).map_err(|error| refused(&error)))?;
    to_python(py, &state)
}

fn refused(error: &NvmlError) -> TrainerError {
    TrainerError::Request(match error {
        NvmlError::LibloadingError(error) => format!("NVML cannot be opened: {error}"),
        error => format!("NVML does not answer: {error}"),
    })
}

fn state_of(uuid: &str) -> Result<Value, NvmlError> {
    let nvml = Nvml::init()?;
    let gpu = nvml.device_by_uuid(uuid)?;
    Ok(json!({
        "pcie": {
            "generation": gpu.current_pcie_link_gen().ok(),
            "width": gpu.current_pcie_link_width().ok(),
            "max_generation": gpu.max_pcie_link_gen().ok(),
            "max_width": gpu.max_pcie_link_width().ok(),
        },
        "power": {
            "limit_milliwatts": gpu.enforced_power_limit().ok(),
            "default_milliwatts": gpu.power_management_limit_default().ok(),
        },
        "persistence": gpu.is_in_persistent_mode().ok(),
        "clocks": {
            "sm_mhz": gpu.clock_info(Clock::SM).ok(),
            "max_sm_mhz": gpu.max_clock_info(Clock::SM).ok(),
            "slowed_by": slowed_by(&gpu),
        },
        "ecc": {
            "enabled": gpu.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled),
            "uncorrected_errors": gpu.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        },
        "other_processes": other_processes(&gpu),
    }))
}

fn slowed_by(gpu: &Device<'_>) -> Option<Vec<&'static str>> {
    let reasons = gpu.current_throttle_reasons().ok()?;
    Some(SLOWDOWNS.iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, name)| *name).collect())
}

/// Process ids and the bytes that each holds, this process left out; bytes are None where the driver keeps them to
/// itself.
fn other_processes(gpu: &Device<'_>) -> Option<Vec<Value>> {
    let (computing, drawing) =
        (gpu.running_compute_processes().ok()?, gpu.running_graphics_processes().unwrap_or_default());
    let mut others: Vec<(u32, Option<u64>)> = computing
        .into_iter()
        .chain(drawing)
        .filter(|process| process.pid != std::process::id())
        .map(|process| match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => (process.pid, Some(bytes)),
            UsedGpuMemory::Unavailable => (process.pid, None),
        })
        .collect();
    // One that computes and draws is in both lists.
    others.sort_unstable_by_key(|&(pid, bytes)| (pid, Reverse(bytes)));
    others.dedup_by_key(|(pid, _)| *pid);
    Some(others.into_iter().map(|(pid, bytes)| json!({"pid": pid, "bytes": bytes})).collect())
}
