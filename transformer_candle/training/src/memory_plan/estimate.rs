//! How long a run takes, at speeds that are measured or assumed and say so.

use model::ParameterLayout;
use run_config::{Algorithm, RunConfig};
use serde::Serialize;

use super::cpu_speed::CpuSpeed;
use crate::{
    device::GpuMemory,
    engine::{model_shape, muon_flops},
    error::Result,
    schedule,
};

/// Nominal FLOPs per second of an RTX 5090, bf16 with f32 accumulation.
const RTX_5090_FLOPS: f64 = 209.5e12;
/// The share of it that a well-tuned trainer reaches on models of this kind.
const RTX_5090_UTILIZATION: f64 = 0.8;
/// The share that one reaches of any other GPU's peak: less, where memory is slower beside the arithmetic.
const OTHER_GPU_UTILIZATION: f64 = 0.5;
/// The fraction of a CPU's matmul speed that whole steps sustain.
const CPU_UTILIZATION: f64 = 0.75;
/// A run that takes a CPU longer than this is not meant for one.
const LONGEST_CPU_RUN_SECONDS: f64 = 30.0 * 86_400.0;

/// How long a run takes at one speed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Target tokens per second.
    pub tokens_per_second: f64,
    /// The whole run, where its length is known.
    pub seconds: Option<f64>,
    /// Where the speed comes from.
    pub assumption: String,
}

/// What a run computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    /// Of the model, forward and backward.
    pub(super) flops_per_token: f64,
    /// Of the optimizer's GEMMs, which `AdamW` has none of.
    optimizer_flops_per_token: f64,
    pub(super) total_tokens: Option<u64>,
}

impl Workload {
    /// What a run of this config computes.
    pub(super) fn new(config: &RunConfig) -> Result<Self> {
        let shape = model_shape(config)?;
        let flops_per_token = shape.flops_per_token(config.data.sequence_length);
        let tokens_per_step = config.data.tokens_per_step() as u64;
        let optimizer_flops = match config.optimizer.algorithm {
            Algorithm::AdamW => 0.0,
            Algorithm::Muon => muon_flops(&ParameterLayout::new(&shape)),
        };
        let optimizer_flops_per_token = optimizer_flops / tokens_per_step as f64;
        let total_tokens = config.scheduler.total_steps.map(|steps| schedule::tokens_of(config, steps));
        Ok(Self { flops_per_token, optimizer_flops_per_token, total_tokens })
    }

    /// The optimizer's part of a step's FLOPs, where it has GEMMs.
    pub(super) fn optimizer_share(self) -> Option<f64> {
        let Self { flops_per_token, optimizer_flops_per_token: optimizer, .. } = self;
        (optimizer > 0.0).then(|| optimizer / (flops_per_token + optimizer))
    }

    fn estimate(self, flops_per_second: f64, assumption: String) -> Estimate {
        let tokens_per_second = flops_per_second / (self.flops_per_token + self.optimizer_flops_per_token);
        let seconds = self.total_tokens.map(|tokens| tokens as f64 / tokens_per_second);
        Estimate { tokens_per_second, seconds, assumption }
    }

    pub(super) fn on_cpu(self, CpuSpeed { threads, flops }: CpuSpeed) -> Estimate {
        let (percent, gigaflops) = (100.0 * CPU_UTILIZATION, flops / 1e9);
        let measured = format!("the {gigaflops:.0} GFLOP/s measured for matmul on this machine");
        let plural = if threads == 1 { "" } else { "s" };
        self.estimate(
            flops * CPU_UTILIZATION,
            format!("on {threads} CPU thread{plural}, assuming {percent:.0} % of {measured}"),
        )
    }

    pub(super) fn on_assumed_gpu(self) -> Estimate {
        let assumption = "on an RTX 5090, assuming 80 % of its 209.5 TFLOP/s".to_owned();
        self.estimate(RTX_5090_FLOPS * RTX_5090_UTILIZATION, assumption)
    }

    /// On a GPU; one whose peak is not known is taken for the one that the presets are made for.
    pub(super) fn on_gpu(self, gpu: &GpuMemory) -> Estimate {
        let Some(peak) = gpu.peak else {
            return self.on_assumed_gpu();
        };
        let utilization =
            if (peak - RTX_5090_FLOPS).abs() < 1.0 { RTX_5090_UTILIZATION } else { OTHER_GPU_UTILIZATION };
        let (name, percent, teraflops) = (&gpu.name, 100.0 * utilization, peak / 1e12);
        self.estimate(peak * utilization, format!("on {name}, assuming {percent:.0} % of its {teraflops:.1} TFLOP/s"))
    }

    /// Whether the run would take this machine's CPU months.
    pub(super) fn is_too_long_for_cpu(self, speed: CpuSpeed) -> bool {
        self.on_cpu(speed).seconds.is_some_and(|seconds| seconds > LONGEST_CPU_RUN_SECONDS)
    }
}
