//! The state of a GPU that its speed depends on (clocks, power, heat, other processes), as NVML, the driver's
//! management library, reports it.
//!
//! The library is opened at run time and only here: `doctor` reads the whole state once, the utilization sampler a few
//! numbers every few seconds.

use std::cmp::Reverse;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde_json::{Value, json};

use crate::error::{Result, TrainerError};
use crate::report::GpuUtilization;

/// NVML's reasons for clocks below their maximum, with their names.
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

/// Short names of reasons that throttle a GPU, the gravest first: heat, then the power supply, then the power limit,
/// which a GPU under full load often reaches without harm.
const THROTTLES: [(ThrottleReasons, &str); 4] = [
    (ThrottleReasons::SW_THERMAL_SLOWDOWN.union(ThrottleReasons::HW_THERMAL_SLOWDOWN), "thermal"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
    (ThrottleReasons::SW_POWER_CAP, "power limit"),
];

/// Returns what NVML reports of the GPU with this UUID as JSON, with null for what the GPU does not support.
///
/// # Errors
/// [`TrainerError::Request`] if NVML cannot be opened or does not know the GPU.
pub fn gpu_state(uuid: &str) -> Result<Value> {
    state_of(uuid).map_err(|error| {
        TrainerError::Request(match error {
            NvmlError::LibloadingError(error) => format!("NVML cannot be opened: {error}"),
            error => format!("NVML does not answer: {error}"),
        })
    })
}

fn state_of(uuid: &str) -> std::result::Result<Value, NvmlError> {
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

/// Returns the ids of the GPU's other processes and the bytes of each; bytes are null where the driver hides them.
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

/// An open NVML that reads the utilization of one GPU again and again.
pub(crate) struct GpuMonitor {
    nvml: Nvml,
    uuid: String,
}

impl GpuMonitor {
    /// Opens NVML; None where it cannot be opened.
    pub(crate) fn open(uuid: &str) -> Option<Self> {
        Some(Self { nvml: Nvml::init().ok()?, uuid: uuid.to_owned() })
    }

    /// Returns the GPU's current utilization; None if NVML does not answer, as after the driver has lost the GPU.
    pub(crate) fn read(&self) -> Option<GpuUtilization> {
        let gpu = self.nvml.device_by_uuid(self.uuid.as_str()).ok()?;
        let watts = |milliwatts: std::result::Result<u32, NvmlError>| Some(f64::from(milliwatts.ok()?) / 1e3);
        let memory = gpu.memory_info().ok();
        Some(GpuUtilization {
            utilization: gpu.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
            memory_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            power_watts: watts(gpu.power_usage()),
            power_limit_watts: watts(gpu.enforced_power_limit()),
            temperature_celsius: gpu.temperature(TemperatureSensor::Gpu).ok().map(u64::from),
            clock_mhz: gpu.clock_info(Clock::SM).ok().map(u64::from),
            throttle: gpu.current_throttle_reasons().ok().and_then(throttle),
        })
    }
}

fn throttle(reasons: ThrottleReasons) -> Option<&'static str> {
    THROTTLES.iter().find(|(reason, _)| reasons.intersects(*reason)).map(|(_, word)| *word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_outranks_the_power_limit() {
        let power = ThrottleReasons::SW_POWER_CAP;
        assert_eq!(throttle(power), Some("power limit"));
        assert_eq!(throttle(power | ThrottleReasons::HW_SLOWDOWN), Some("hardware slowdown"));
        assert_eq!(throttle(power | ThrottleReasons::SW_THERMAL_SLOWDOWN), Some("thermal"));
        assert_eq!(throttle(ThrottleReasons::GPU_IDLE), None);
    }
}
