//! What a run takes of its machine.

use serde::{Serialize, Serializer};

use super::scalar::{Record, Scalar, Text};
use crate::units::bytes;

/// What a run takes of its machine, sampled beside training.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilizationReport {
    /// Optimizer steps taken when it was recorded.
    pub step: u64,
    /// When it was sampled, in seconds since 1970.
    pub time: f64,
    /// Resident memory of the process.
    pub rss_bytes: u64,
    /// Mean number of cores that the process kept busy since the sample before.
    pub cpu_cores: f64,
    /// Memory of the process that is swapped out.
    pub swap_bytes: u64,
    /// The GPU that it trains on; none on a CPU, and while NVML does not answer.
    pub gpu: Option<GpuUtilization>,
}

/// What a GPU does at one moment; none for what it does not report, as a slice of one (MIG) reports no utilization.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuUtilization {
    /// Fraction of the time, 0 to 1, in which a kernel was running.
    pub utilization: Option<f64>,
    /// Memory in use, by every program.
    pub memory_bytes: Option<u64>,
    /// All its memory.
    pub memory_total_bytes: Option<u64>,
    /// Power draw.
    pub power_watts: Option<f64>,
    /// The power limit in force.
    pub power_limit_watts: Option<f64>,
    /// Temperature of the chip.
    pub temperature_celsius: Option<u64>,
    /// Clock of its multiprocessors.
    pub clock_mhz: Option<u64>,
    /// What lowers its clocks: `thermal`, `power brake`, `hardware slowdown` or `power limit`; none if nothing does.
    pub throttle: Option<&'static str>,
}

impl UtilizationReport {
    /// The logged numbers, without the step.
    pub fn scalars(&self) -> Vec<Scalar> {
        let mut scalars = vec![
            Scalar::plain("time", self.time),
            Scalar::curve("rss_bytes", "system/rss_bytes", self.rss_bytes),
            Scalar::curve("cpu_cores", "system/cpu_cores", self.cpu_cores),
            Scalar::curve("swap_bytes", "system/swap_bytes", self.swap_bytes),
        ];
        scalars.extend(self.gpu.iter().flat_map(GpuUtilization::scalars));
        scalars
    }

    /// The record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let throttle = |gpu: &GpuUtilization| Text { key: "gpu_throttle", value: gpu.throttle.map(ToOwned::to_owned) };
        let texts = self.gpu.iter().map(throttle).collect();
        Record { scalars: self.scalars(), texts, ..Record::new("utilization", self.step) }
    }

    /// `GPU 97 % 412 W` on a GPU, else `CPU 1.9 cores 812.3 MB`.
    pub fn summary(&self) -> String {
        let Some(gpu) = &self.gpu else {
            return format!("CPU {:.1} cores {}", self.cpu_cores, bytes(self.rss_bytes));
        };
        let utilization = gpu.utilization.map(|fraction| format!(" {:.0} %", 100.0 * fraction));
        let power = gpu.power_watts.map(|watts| format!(" {watts:.0} W"));
        let throttle = gpu.throttle.map(|reason| format!(" ({reason})"));
        format!("GPU{}{}{}", utilization.unwrap_or_default(), power.unwrap_or_default(), throttle.unwrap_or_default())
    }
}

impl GpuUtilization {
    fn scalars(&self) -> [Scalar; 7] {
        [
            Scalar::optional_curve("gpu_utilization", "system/gpu_utilization", self.utilization),
            Scalar::optional_curve("gpu_memory_bytes", "system/gpu_memory_bytes", self.memory_bytes),
            Scalar::optional_plain("gpu_memory_total_bytes", self.memory_total_bytes),
            Scalar::optional_curve("gpu_power_watts", "system/gpu_power_watts", self.power_watts),
            Scalar::optional_plain("gpu_power_limit_watts", self.power_limit_watts),
            Scalar::optional_curve(
                "gpu_temperature_celsius",
                "system/gpu_temperature_celsius",
                self.temperature_celsius,
            ),
            Scalar::optional_curve("gpu_clock_mhz", "system/gpu_clock_mhz", self.clock_mhz),
        ]
    }
}

impl Serialize for UtilizationReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.record().serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_shows_the_gpu_or_the_process() {
        let mut report =
            UtilizationReport { step: 1, time: 0.0, rss_bytes: 812_300_000, cpu_cores: 1.94, swap_bytes: 0, gpu: None };
        assert_eq!(report.summary(), "CPU 1.9 cores 812.3 MB");
        let gpu = GpuUtilization { utilization: Some(0.97), power_watts: Some(411.6), ..GpuUtilization::default() };
        report.gpu = Some(gpu.clone());
        assert_eq!(report.summary(), "GPU 97 % 412 W");
        report.gpu = Some(GpuUtilization { throttle: Some("thermal"), ..gpu });
        assert_eq!(report.summary(), "GPU 97 % 412 W (thermal)");
    }
}
