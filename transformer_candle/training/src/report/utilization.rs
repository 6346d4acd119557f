//! A run's use of its machine: memory, CPU and GPU.

use super::{
    ranks::RankUsage,
    scalar::{Record, Scalar, Text},
};
use crate::units::bytes;

/// A sample of a run's use of its machine, taken beside training.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilizationReport {
    /// Optimizer steps taken when it was recorded.
    pub step: u64,
    /// When it was sampled, in seconds since 1970.
    pub time: f64,
    /// Resident memory of the process, or of all ranks, in bytes.
    pub rss_bytes: u64,
    /// Mean number of cores that the process, or all ranks, kept busy since the sample before.
    pub cpu_cores: f64,
    /// Swapped-out memory of the process, or of all ranks, in bytes.
    pub swap_bytes: u64,
    /// The rank that uses the most memory; none where there is one process.
    pub ranks: Option<RanksUtilization>,
    /// The GPU that it trains on; none on a CPU, and while NVML does not answer.
    pub gpu: Option<GpuUtilization>,
}

/// The rank that uses the most memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RanksUtilization {
    /// The rank with the most resident memory.
    pub largest: usize,
    /// Its resident memory.
    pub max_rss_bytes: u64,
}

/// The state of a GPU at one moment; None for what it does not report, as a MIG slice reports no utilization.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuUtilization {
    /// Fraction of the time, 0 to 1, in which a kernel was running.
    pub utilization: Option<f64>,
    /// Memory in use by all programs, in bytes.
    pub memory_bytes: Option<u64>,
    /// Total memory in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Power draw.
    pub power_watts: Option<f64>,
    /// The power limit in force.
    pub power_limit_watts: Option<f64>,
    /// Temperature of the chip.
    pub temperature_celsius: Option<u64>,
    /// Clock of its multiprocessors.
    pub clock_mhz: Option<u64>,
    /// The reason for lowered clocks: `thermal`, `power brake`, `hardware slowdown` or `power limit`; None without one.
    pub throttle: Option<&'static str>,
}

impl UtilizationReport {
    /// Returns this process's memory and CPU use.
    pub(crate) fn usage(&self) -> RankUsage {
        RankUsage { rss_bytes: self.rss_bytes, cpu_cores: self.cpu_cores, swap_bytes: self.swap_bytes }
    }

    /// Converts a sample of this process to one of all ranks, given the usage of each; for one process it stays as it
    /// is. None while a rank has not been sampled. The GPU stays this process's.
    pub(crate) fn of_ranks(self, all: &[RankUsage]) -> Option<Self> {
        if all.len() < 2 {
            return Some(self);
        }
        if all.iter().any(|rank| rank.rss_bytes == 0) {
            return None;
        }
        let (largest, most) = all.iter().enumerate().max_by_key(|(_, rank)| rank.rss_bytes)?;
        Some(Self {
            rss_bytes: all.iter().map(|rank| rank.rss_bytes).sum(),
            cpu_cores: all.iter().map(|rank| rank.cpu_cores).sum(),
            swap_bytes: all.iter().map(|rank| rank.swap_bytes).sum(),
            ranks: Some(RanksUtilization { largest, max_rss_bytes: most.rss_bytes }),
            ..self
        })
    }

    /// Returns the logged numbers, without the step.
    pub fn scalars(&self) -> Vec<Scalar> {
        let mut scalars = vec![
            Scalar::plain("time", self.time),
            Scalar::curve("rss_bytes", "system/rss_bytes", self.rss_bytes),
            Scalar::curve("cpu_cores", "system/cpu_cores", self.cpu_cores),
            Scalar::curve("swap_bytes", "system/swap_bytes", self.swap_bytes),
        ];
        scalars.extend(self.ranks.iter().flat_map(RanksUtilization::scalars));
        scalars.extend(self.gpu.iter().flat_map(GpuUtilization::scalars));
        scalars
    }

    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let throttle = |gpu: &GpuUtilization| Text { key: "gpu_throttle", value: gpu.throttle.map(ToOwned::to_owned) };
        let texts = self.gpu.iter().map(throttle).collect();
        Record { scalars: self.scalars(), texts, ..Record::new("utilization", self.step) }
    }

    /// Formats the sample: `GPU 97 % 412 W` on a GPU, else `CPU 1.9 cores 812.3 MB`.
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

impl RanksUtilization {
    fn scalars(&self) -> [Scalar; 2] {
        [
            Scalar::curve("max_rank_rss_bytes", "system/max_rank_rss_bytes", self.max_rss_bytes),
            Scalar::plain("largest_rank", self.largest as u64),
        ]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_shows_the_gpu_or_the_process() {
        let mut report = UtilizationReport {
            step: 1,
            time: 0.0,
            rss_bytes: 812_300_000,
            cpu_cores: 1.94,
            swap_bytes: 0,
            ranks: None,
            gpu: None,
        };
        assert_eq!(report.summary(), "CPU 1.9 cores 812.3 MB");
        let gpu = GpuUtilization { utilization: Some(0.97), power_watts: Some(411.6), ..GpuUtilization::default() };
        report.gpu = Some(gpu.clone());
        assert_eq!(report.summary(), "GPU 97 % 412 W");
        report.gpu = Some(GpuUtilization { throttle: Some("thermal"), ..gpu });
        assert_eq!(report.summary(), "GPU 97 % 412 W (thermal)");
    }
    #[test]
    fn ranks_are_added_up_once_all_are_sampled() {
        let sample = UtilizationReport {
            step: 1,
            time: 0.0,
            rss_bytes: 7,
            cpu_cores: 0.5,
            swap_bytes: 0,
            ranks: None,
            gpu: None,
        };
        assert_eq!(sample.clone().of_ranks(&[]), Some(sample.clone()));
        let other = RankUsage { rss_bytes: 9, cpu_cores: 1.25, swap_bytes: 3 };
        assert_eq!(sample.clone().of_ranks(&[sample.usage(), RankUsage::default(), other]), None);
        let all = sample.clone().of_ranks(&[sample.usage(), other]).unwrap();
        assert_eq!((all.rss_bytes, all.swap_bytes), (16, 3));
        assert!((all.cpu_cores - 1.75).abs() < 1e-12);
        assert_eq!(all.ranks, Some(RanksUtilization { largest: 1, max_rss_bytes: 9 }));
    }
}
