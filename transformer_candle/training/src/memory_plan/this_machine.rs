//! What a plan needs to know of the machine that it is made on.

use std::time::SystemTime;

use kernels::{Device, cuda::Gpu};
use run_config::RunConfig;

use super::{
    available_memory::{AvailableMemory, available_memory},
    calibration::{Calibration, calibrate},
    cpu_speed::CpuSpeed,
    measured::{self, MeasuredStep},
};
use crate::{
    device::{self, GpuMemory},
    engine::StepOf,
    environment,
    error::Result,
    pool,
};

/// What a plan needs to know of a machine, by default of the one that the program runs on; tests implement it for
/// machines that do not exist.
pub(super) trait Machine {
    /// The processor's name; none where the system does not tell.
    fn processor(&self) -> Option<String> {
        environment::processor()
    }

    /// The memory that a process with so many threads may still allocate; none where the system does not tell.
    fn available_memory(&self, threads: usize) -> Option<AvailableMemory> {
        available_memory(threads)
    }

    /// The GPUs that the driver lists; none without a driver or a build for it, as training will say.
    fn gpus(&self) -> Vec<Gpu> {
        device::gpus().unwrap_or_default()
    }

    /// A GPU's memory and speed.
    fn look_at(&self, gpu: &Gpu) -> GpuMemory {
        GpuMemory::measure(gpu)
    }

    /// The CPU's matmul speed.
    fn matmul_speed(&self, config: &RunConfig) -> Result<CpuSpeed> {
        CpuSpeed::measure(config)
    }

    /// A step's time on the CPU; none where there is no memory or no time to time it.
    fn calibrate(&self, step: StepOf<'_>, matmul: CpuSpeed) -> Result<Option<Calibration>> {
        calibrate(step, matmul)
    }

    /// What `bench` has measured of a config on a device of this name.
    fn measured(&self, step: StepOf<'_>, device: &str) -> Option<MeasuredStep> {
        measured::find(step, device)
    }

    /// The load average of the last minute: programs that run or wait for a core; none where the system does not tell.
    fn load(&self) -> Option<f64> {
        std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
    }

    /// The current time.
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// The machine that the program runs on.
pub(super) struct ThisMachine;

impl Machine for ThisMachine {}

/// The name that measurements on a device at hand are kept under, as [`super::target::PlanTarget::name`] has it.
pub(super) fn device_name(config: &RunConfig, device: &Device) -> Result<String> {
    Ok(match device.as_cuda() {
        Some(gpu) => gpu.name().to_owned(),
        None => cpu_name(&ThisMachine, pool::from_config(config)?.current_num_threads()),
    })
}

/// The name that measurements on a machine's CPU are kept under.
pub(super) fn cpu_name(machine: &impl Machine, threads: usize) -> String {
    let processor = machine.processor().unwrap_or_else(|| "CPU".to_owned());
    format!("{processor}, {threads} thread{}", if threads == 1 { "" } else { "s" })
}
