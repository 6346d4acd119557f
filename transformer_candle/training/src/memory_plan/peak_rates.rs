//! The rates that bound the operations of a step on a device at hand: the ceilings of its roofline.

use std::{collections::BTreeMap, time::Duration};

use kernels::{Buffer, DType, Device, cast};
use run_config::RunConfig;

use super::{
    cpu_speed::{CpuSpeed, fastest},
    gpu_table::{GpuSpec, SustainedFractions},
    roofline::{Bound, LAUNCH_SECONDS, Rates, Roofline},
    step_part::StepPart,
};
use crate::{device::GpuMemory, engine::StepOf, error::Result, pool};

/// Elements that are read in f32 and written in bf16 to measure a CPU's memory: more than its caches hold.
const STREAMED_ELEMENTS: usize = 1 << 24;
/// How long that is repeated, at least three times.
const MEASURE_TIME: Duration = Duration::from_millis(100);
/// How often the matmuls are measured: other programs may take the cores meanwhile.
const MATMUL_MEASUREMENTS: usize = 4;
/// Fractions of 1: operations may reach the full rates.
const ALL: SustainedFractions =
    SustainedFractions { gemm: 1.0, attention_forward: 1.0, attention_backward: 1.0, memory: 1.0 };

/// FLOPs, bytes and least seconds of each operation of a step, by its part and its [`StepPart::label`].
pub(crate) type Bounds = BTreeMap<(StepPart, String), Bound>;

/// The peak rates of a device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PeakRates {
    rates: Rates,
    /// Where the numbers come from, for people.
    pub(crate) origin: &'static str,
}

impl PeakRates {
    /// A GPU's nominal rates, or what this CPU reaches in a matmul and in a copy; none for a GPU that is not in the table.
    ///
    /// # Errors
    /// If an operation fails.
    pub(crate) fn of_device(config: &RunConfig, device: &Device) -> Result<Option<Self>> {
        let Some(gpu) = device.as_cuda() else { return Self::of_cpu(config).map(Some) };
        let memory = GpuMemory::now(gpu)?;
        let rates = |spec: &GpuSpec| Rates {
            flops: spec.matmul_flops(config.runtime.precision),
            fp8_speedup: spec.fp8_speedup(config).map_or(1.0, |speedup| speedup.nominal),
            bytes_per_second: spec.bytes_per_second,
            fractions: ALL,
            launch_seconds: LAUNCH_SECONDS,
        };
        let spec = GpuSpec::find(&memory.name, memory.total);
        Ok(spec.map(|spec| Self { rates: rates(spec), origin: "the GPU's nominal rates" }))
    }

    fn of_cpu(config: &RunConfig) -> Result<Self> {
        let mut flops: f64 = 0.0;
        for _ in 0..MATMUL_MEASUREMENTS {
            flops = flops.max(CpuSpeed::measure(config)?.flops);
        }
        let bytes_per_second = pool::from_config(config)?.install(measure_memory)?;
        let rates = Rates { flops, fp8_speedup: 1.0, bytes_per_second, fractions: ALL, launch_seconds: 0.0 };
        Ok(Self { rates, origin: "measured with these threads" })
    }

    /// FLOPs per second of matmuls.
    pub(crate) fn flops(&self) -> f64 {
        self.rates.flops
    }

    /// Bytes per second of memory.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.rates.bytes_per_second
    }

    /// Returns FLOPs, bytes and least seconds of each operation of a step.
    pub(crate) fn bounds(&self, step: StepOf<'_>) -> Bounds {
        Roofline::new(step).bounds(&self.rates)
    }
}

/// Bytes per second that the threads read and write together.
fn measure_memory() -> kernels::Result<f64> {
    let mut source = Buffer::zeros(&[STREAMED_ELEMENTS], DType::F32, &Device::Cpu)?;
    let mut target = Buffer::zeros(&[STREAMED_ELEMENTS], DType::BF16, &Device::Cpu)?;
    // Pages that were never written are all one page, which stays in the cache.
    cast::forward(&target, &mut source)?;
    let fastest = fastest(3, MEASURE_TIME, || cast::forward(&source, &mut target))?;
    Ok((STREAMED_ELEMENTS * (4 + 2)) as f64 / fastest.as_secs_f64())
}
