//! The GPUs that a run can be planned for without having one: what they hold, how fast they are, what they draw.

use std::str::FromStr;

use kernels::{cuda::nominal_bf16_flops, fp8::ScaleBlock};
use run_config::{ByteSize, Precision, RunConfig};
use serde::Serialize;

use super::interconnect::{Link, NVLINK_3, NVLINK_4, PCIE_4, PCIE_5};
use crate::device::scale_block;

/// A GPU of the table. The numbers' sources stand in [`GPUS`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GpuSpec {
    /// Its name as in `--gpu rtx5090`.
    pub key: &'static str,
    /// Its name for people, which the driver's contains.
    pub name: &'static str,
    /// Its compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// What CUDA reports as its memory: less than `nvidia-smi` shows, which counts what the driver keeps.
    pub memory_bytes: u64,
    /// Nominal FLOPs per second of its CUDA cores in f32: what matmuls of `precision: fp32` run on.
    pub fp32_flops: f64,
    /// Nominal memory bandwidth.
    pub bytes_per_second: f64,
    /// The board's power limit.
    pub watts: f64,
    /// Streaming multiprocessors (SMs).
    pub multiprocessors: u32,
    /// The link between several of them in a machine.
    pub link: Link,
    /// How many times as fast as bf16 fp8 GEMMs with one scale are; none where there are none.
    pub fp8_tensorwise: Option<Fp8Speedup>,
    /// The same with block scales.
    pub fp8_block_scaled: Option<Fp8Speedup>,
    /// Fractions of the nominal rates that kernels sustain, pessimistic.
    pub low: SustainedFractions,
    /// Fractions of the nominal rates that kernels sustain, optimistic.
    pub high: SustainedFractions,
}

/// The FLOPs per second of fp8 GEMMs over those of bf16 GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fp8Speedup {
    /// By the nominal rates.
    pub nominal: f64,
    /// What large GEMMs sustain, pessimistic and optimistic.
    pub sustained: [f64; 2],
}

const fn fp8(nominal: f64, sustained: [f64; 2]) -> Fp8Speedup {
    Fp8Speedup { nominal, sustained }
}

/// Fractions of a GPU's nominal rates that launches sustain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SustainedFractions {
    /// Fraction of the FLOPs in large GEMMs.
    pub gemm: f64,
    /// Fraction of the FLOPs in attention's forward pass with heads of 64, counted as 2 GEMMs over the causal half.
    pub attention_forward: f64,
    /// Fraction of the FLOPs in its backward pass, counted as 5 GEMMs.
    pub attention_backward: f64,
    /// Fraction of the memory bandwidth in launches that only move bytes.
    pub memory: f64,
}

const fn fractions(gemm: f64, attention_forward: f64, attention_backward: f64, memory: f64) -> SustainedFractions {
    SustainedFractions { gemm, attention_forward, attention_backward, memory }
}

const fn mebibytes(number: u64) -> u64 {
    number << 20
}

/// Both A100 have its chip; the one of 80 GB has faster memory.
const A100_40: GpuSpec = GpuSpec {
    key: "a100-40",
    name: "A100 40 GB",
    compute_capability: (8, 0),
    memory_bytes: mebibytes(40_335), // 39.39 GiB
    fp32_flops: 19.5e12,
    bytes_per_second: 1.555e12,
    watts: 400.0,
    multiprocessors: 108,
    link: NVLINK_3,
    fp8_tensorwise: None,
    fp8_block_scaled: None,
    // GEMMs published at 230 to 275 TFLOP/s of 312; FlashAttention-2 at 110 to 170 with heads of 64; TinyLlama trains at
    // 56 % MFU.
    low: fractions(0.64, 0.35, 0.28, 0.80),
    high: fractions(0.86, 0.50, 0.42, 0.90),
};

/// Nominal bf16 FLOPs are [`kernels::cuda::nominal_bf16_flops`]'s. f32 FLOPs, bandwidth, watts and SMs: NVIDIA's white
/// papers on GA102 (RTX 3090), AD102 (RTX 4090) and the RTX Blackwell architecture (RTX 5090), and the data sheets of
/// A100, H100 SXM and H200 SXM. Memory: "total capacity of N GiB" in PyTorch's out-of-memory message, which is
/// `cudaDeviceProp::totalGlobalMem`; the smallest value found where drivers differ.
///
/// Links: those of the SXM modules of A100, H100 and H200; a slot of 16 lanes of the others.
///
/// Sustained fractions: those of the H100 and the H200 surround what we measured (docs/experiments/gpu.md).
/// docs/decisions/012 explains those of the RTX 5090, whose upper ones are its assumptions. The others are estimates
/// from published measurements.
pub const GPUS: [GpuSpec; 7] = [
    GpuSpec {
        key: "rtx5090",
        name: "RTX 5090",
        compute_capability: (12, 0),
        memory_bytes: mebibytes(32_122), // 31.37 GiB
        fp32_flops: 104.8e12,
        bytes_per_second: 1.792e12,
        watts: 575.0,
        multiprocessors: 170,
        link: PCIE_5,
        // GEMMs published at 424 TFLOP/s with one scale beside 217 in bf16; MXFP8, which is not throttled, 3.2 times
        // bf16 on an RTX 5060 Ti and 3.9 times on an RTX PRO 6000.
        fp8_tensorwise: Some(fp8(2.0, [1.8, 1.95])),
        fp8_block_scaled: Some(fp8(4.0, [3.2, 3.9])),
        // GEMMs published at 179 to 240 TFLOP/s of 209.5, by clock and power.
        low: fractions(0.80, 0.45, 0.35, 0.80),
        high: fractions(0.92, 0.60, 0.50, 0.90),
    },
    GpuSpec {
        key: "rtx4090",
        name: "RTX 4090",
        compute_capability: (8, 9),
        memory_bytes: mebibytes(24_176), // 23.61 GiB
        fp32_flops: 82.6e12,
        bytes_per_second: 1.008e12,
        watts: 450.0,
        multiprocessors: 128,
        link: PCIE_4,
        // Estimated.
        fp8_tensorwise: Some(fp8(2.0, [1.7, 1.95])),
        fp8_block_scaled: None,
        // GEMMs of 8192^3 published at 135 to 160 TFLOP/s of 165.2.
        low: fractions(0.78, 0.45, 0.35, 0.80),
        high: fractions(0.93, 0.60, 0.50, 0.90),
    },
    GpuSpec {
        key: "rtx3090",
        name: "RTX 3090",
        compute_capability: (8, 6),
        memory_bytes: mebibytes(24_257), // 23.69 GiB
        fp32_flops: 35.6e12,
        bytes_per_second: 936e9,
        watts: 350.0,
        multiprocessors: 82,
        link: PCIE_4,
        fp8_tensorwise: None,
        fp8_block_scaled: None,
        // Limited by power: GEMMs published at 55 to 68 TFLOP/s of 71.
        low: fractions(0.75, 0.45, 0.35, 0.80),
        high: fractions(0.93, 0.60, 0.50, 0.90),
    },
    A100_40,
    GpuSpec {
        key: "a100-80",
        name: "A100 80 GB",
        memory_bytes: mebibytes(81_049), // 79.15 GiB
        bytes_per_second: 2.039e12,
        ..A100_40
    },
    GpuSpec {
        key: "h100",
        name: "H100",
        compute_capability: (9, 0),
        memory_bytes: mebibytes(81_008), // 79.11 GiB
        fp32_flops: 66.9e12,
        bytes_per_second: 3.35e12,
        watts: 700.0,
        multiprocessors: 132,
        link: NVLINK_4,
        // GEMMs of 4096^3 published at 1,230 TFLOP/s with one scale; estimated with block scales.
        fp8_tensorwise: Some(fp8(2.0, [1.4, 1.64])),
        fp8_block_scaled: Some(fp8(2.0, [1.2, 1.46])),
        // Measured in a step of rtx5090_1b: 0.72 to 0.75, 0.30, 0.26, and 0.87 where bytes are all that is moved.
        low: fractions(0.68, 0.28, 0.23, 0.80),
        high: fractions(0.77, 0.32, 0.27, 0.90),
    },
    GpuSpec {
        key: "h200",
        name: "H200",
        compute_capability: (9, 0),
        memory_bytes: mebibytes(143_073), // 139.72 GiB
        fp32_flops: 66.9e12,
        bytes_per_second: 4.8e12,
        watts: 700.0,
        multiprocessors: 132,
        link: NVLINK_4,
        fp8_tensorwise: Some(fp8(2.0, [1.4, 1.64])),
        fp8_block_scaled: Some(fp8(2.0, [1.2, 1.46])),
        // GEMMs and attention measured as on the H100; 0.80 of the bandwidth, copies 0.90.
        low: fractions(0.68, 0.28, 0.23, 0.77),
        high: fractions(0.77, 0.32, 0.27, 0.90),
    },
];

impl GpuSpec {
    /// The GPU that the presets of 1 B parameters are made for, and that is assumed where there is none.
    pub const fn rtx_5090() -> &'static Self {
        &GPUS[0]
    }

    /// Nominal bf16 FLOPs per second, dense, with f32 accumulation: the denominator of MFU.
    ///
    /// # Panics
    /// Never: a test finds the number of every GPU of the table.
    pub fn bf16_flops(&self) -> f64 {
        nominal_bf16_flops(self.name).expect("every GPU of the table has a nominal peak")
    }

    /// Nominal FLOPs per second of matmuls in this precision.
    pub(super) fn matmul_flops(&self, precision: Precision) -> f64 {
        match precision {
            Precision::Bf16 | Precision::Fp8 => self.bf16_flops(),
            Precision::Fp32 => self.fp32_flops,
        }
    }

    /// How many times as fast as in bf16 the matmuls of a run are that are in fp8; none where it has no such ones.
    pub(super) fn fp8_speedup(&self, config: &RunConfig) -> Option<Fp8Speedup> {
        match (config.runtime.precision, scale_block(config.runtime.fp8_recipe)) {
            (Precision::Fp32 | Precision::Bf16, _) => None,
            (Precision::Fp8, ScaleBlock::Tensor) => self.fp8_tensorwise,
            (Precision::Fp8, ScaleBlock::Square128 | ScaleBlock::Square32) => self.fp8_block_scaled,
        }
    }

    /// What CUDA reports as its memory.
    pub fn memory(&self) -> ByteSize {
        ByteSize(self.memory_bytes)
    }

    /// The GPU of the table that the driver calls `name`; of two with one name, the one whose memory is closer.
    pub(super) fn find(name: &str, memory_bytes: u64) -> Option<&'static Self> {
        let peak = nominal_bf16_flops(name)?;
        let model = |spec: &Self| spec.name.split(" 40 GB").next()?.split(" 80 GB").next().map(str::to_owned);
        GPUS.iter()
            .filter(|spec| spec.bf16_flops().total_cmp(&peak).is_eq())
            .filter(|spec| model(spec).is_some_and(|model| name.contains(&model)))
            .min_by_key(|spec| spec.memory_bytes.abs_diff(memory_bytes))
    }
}

/// The device that `plan --gpu` names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlanGpu {
    /// Whatever this machine has: its GPU, or its CPU.
    This,
    /// A GPU of the table.
    Named(&'static GpuSpec),
}

impl FromStr for PlanGpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "this" {
            return Ok(Self::This);
        }
        let names = || GPUS.map(|gpu| gpu.key).join(", ");
        let gpu = GPUS.iter().find(|gpu| gpu.key.eq_ignore_ascii_case(text));
        gpu.map(Self::Named).ok_or_else(|| format!("must be one of {} or this", names()))
    }
}

#[cfg(test)]
mod tests {
    use kernels::cuda::limits;

    use super::*;

    #[test]
    fn every_gpu_has_a_peak_and_is_found_by_its_name() {
        for gpu in &GPUS {
            assert!(gpu.bf16_flops() > gpu.fp32_flops, "{}", gpu.key);
            assert_eq!(GpuSpec::find(gpu.name, gpu.memory_bytes), Some(gpu));
            assert!(gpu.key.parse() == Ok(PlanGpu::Named(gpu)));
            for (low, high) in [
                (gpu.low.gemm, gpu.high.gemm),
                (gpu.low.attention_forward, gpu.high.attention_forward),
                (gpu.low.attention_backward, gpu.high.attention_backward),
                (gpu.low.memory, gpu.high.memory),
            ] {
                assert!(0.0 < low && low < high && high < 1.0, "{}", gpu.key);
            }
            // The recipes that a GPU has are those that it is planned with.
            let blocks = limits::fp8_blocks(gpu.compute_capability, (13, 0));
            let speedups = [gpu.fp8_tensorwise, gpu.fp8_block_scaled];
            assert_eq!(speedups.iter().flatten().count(), blocks.len(), "{}", gpu.key);
            for Fp8Speedup { nominal, sustained: [low, high] } in speedups.into_iter().flatten() {
                assert!(1.0 < low && low < high && high < nominal, "{}", gpu.key);
            }
        }
        let driver = |name, gibibytes: u64| GpuSpec::find(name, gibibytes << 30).map(|gpu| gpu.key);
        assert_eq!(driver("NVIDIA GeForce RTX 5090", 31), Some("rtx5090"));
        assert_eq!(driver("NVIDIA A100-SXM4-40GB", 39), Some("a100-40"));
        assert_eq!(driver("NVIDIA A100-SXM4-80GB", 79), Some("a100-80"));
        assert_eq!(driver("NVIDIA H100 80GB HBM3", 79), Some("h100"));
        assert_eq!(driver("NVIDIA H200", 139), Some("h200"));
        assert_eq!(driver("NVIDIA H100 PCIe", 79), None, "slower than the table's");
        assert_eq!(driver("NVIDIA L4", 22), None);
    }

    #[test]
    fn an_unknown_gpu_is_refused_with_the_known_ones() {
        let refused = "rtx2080".parse::<PlanGpu>().unwrap_err();
        assert_eq!(refused, "must be one of rtx5090, rtx4090, rtx3090, a100-40, a100-80, h100, h200 or this");
    }
}
