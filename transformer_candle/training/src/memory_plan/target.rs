//! The device that a plan is made for, as far as its memory and its speed go.

use kernels::{Device, DeviceKind, cuda::Gpu};
use run_config::RunConfig;

use super::{
    cpu_speed::CpuSpeed,
    estimate::{Estimate, Workload},
};
use crate::{
    device::{self, GpuMemory, refusal},
    error::{Result, TrainerError},
};

/// The device that a plan is made for.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PlanTarget {
    /// This machine's CPU, and how fast it is where somebody has measured.
    Cpu(Option<CpuSpeed>),
    /// A GPU of this machine.
    Gpu(GpuMemory),
    /// The GPU that the presets are made for, on some other machine.
    AssumedGpu,
}

impl PlanTarget {
    /// Where a run is meant to be trained: the GPU that it names or finds, one that is assumed if it is meant for a GPU
    /// and there is none here, else the CPU.
    ///
    /// # Errors
    /// [`TrainerError::Request`] where the run names a GPU and its model needs a CPU.
    pub(super) fn choose(
        config: &RunConfig,
        gpus: &[Gpu],
        look: impl Fn(&Gpu) -> GpuMemory,
        measure: impl Fn(&RunConfig) -> Result<CpuSpeed>,
    ) -> Result<Self> {
        let refusal = refusal(config)?;
        let found = |ordinal| gpus.iter().find(|gpu| gpu.ordinal == ordinal && gpu.refusal().is_none());
        let gpu = |gpu: Option<&Gpu>| gpu.map_or(Self::AssumedGpu, |gpu| Self::Gpu(look(gpu)));
        match (config.runtime.device, refusal) {
            (run_config::Device::Cpu, _) | (run_config::Device::Auto, Some(_)) => Ok(Self::Cpu(Some(measure(config)?))),
            (run_config::Device::Cuda(ordinal), None) => Ok(gpu(found(ordinal))),
            (named @ run_config::Device::Cuda(_), Some(clause)) => {
                Err(TrainerError::Request(device::refused(named, &clause)))
            }
            (run_config::Device::Auto, None) => match found(0) {
                None => {
                    let speed = measure(config)?;
                    let too_long = Workload::new(config)?.is_too_long_for_cpu(speed);
                    Ok(if too_long { Self::AssumedGpu } else { Self::Cpu(Some(speed)) })
                }
                found => Ok(gpu(found)),
            },
        }
    }

    /// A device at hand; a CPU's speed is not measured.
    pub(super) fn open(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Cpu(None)),
            Device::Cuda(gpu) => Ok(Self::Gpu(GpuMemory::now(gpu)?)),
        }
    }

    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Self::Cpu(_) => DeviceKind::Cpu,
            Self::Gpu(_) | Self::AssumedGpu => DeviceKind::Cuda,
        }
    }

    /// How long a run takes there, if the device's speed is known.
    pub(super) fn estimate(&self, work: Workload) -> Option<Estimate> {
        match self {
            Self::Cpu(speed) => speed.map(|speed| work.on_cpu(speed)),
            Self::Gpu(gpu) => Some(work.on_gpu(gpu)),
            Self::AssumedGpu => Some(work.on_assumed_gpu()),
        }
    }
}
