//! The FLOPs per token of a run, and the number of its tokens.

use model::ParameterLayout;
use run_config::{Algorithm, RunConfig};

use super::cpu_speed::CpuSpeed;
use crate::{
    engine::{model_shape, muon_flops},
    error::Result,
    schedule,
};

/// The fraction of a CPU's matmul speed that whole steps sustain, to tell runs of months from others.
const CPU_UTILIZATION: f64 = 0.75;
/// A run that takes a CPU longer than this is not meant for one.
const LONGEST_CPU_RUN_SECONDS: f64 = 30.0 * 86_400.0;

/// The FLOPs per token of a run, and its tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    /// FLOPs of the model, forward and backward.
    pub(super) flops_per_token: f64,
    /// FLOPs of the optimizer's GEMMs; 0 for `AdamW`, which has none.
    optimizer_flops_per_token: f64,
    pub(super) total_tokens: Option<u64>,
}

impl Workload {
    /// Computes the workload of a config's run.
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

    /// Returns the optimizer's share of a step's FLOPs; none where it has no GEMMs.
    pub(super) fn optimizer_share(self) -> Option<f64> {
        let Self { flops_per_token, optimizer_flops_per_token: optimizer, .. } = self;
        (optimizer > 0.0).then(|| optimizer / (flops_per_token + optimizer))
    }

    /// Whether the run would take this machine's CPU months.
    pub(super) fn is_too_long_for_cpu(self, speed: CpuSpeed) -> bool {
        let tokens_per_second = CPU_UTILIZATION * speed.flops / (self.flops_per_token + self.optimizer_flops_per_token);
        self.total_tokens.is_some_and(|tokens| tokens as f64 / tokens_per_second > LONGEST_CPU_RUN_SECONDS)
    }
}
