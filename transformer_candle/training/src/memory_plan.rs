//! Everything a run will hold in memory, computed from its config alone.
//!
//! The buffers listed here are the ones that the trainer allocates before its first step: it has no other list. So a
//! run that cannot fit is refused before it starts, and told what would.

mod allocate;
mod budget;
mod cpu_speed;
mod display;
mod estimate;
mod fit;
mod machine;
mod target;
#[cfg(test)]
mod tests;

use kernels::{Device, DeviceKind, cuda::Gpu};
use model::dtype_of;
use run_config::{ActivationRecompute, Precision, ResolvedRun, RunConfig};
use serde::Serialize;

pub use allocate::allocate;
pub use budget::{RTX_5090, require_room};
use cpu_speed::CpuSpeed;
pub use estimate::Estimate;
use estimate::Workload;
use target::PlanTarget;

pub use crate::error::{Budget, MemoryRequirement, Shortage};
use crate::{
    checkpoint,
    device::{self, GpuMemory},
    engine::{EngineSettings, RunBuffers, model_shape},
    error::{Result, TrainerError},
    schedule::sequences_at,
};

/// Host memory that saving takes besides the buffers: a piece of 2^20 elements as numbers and as bytes.
const SAVING_BYTES: u64 = 8 << 20;

/// A run's memory, disk and compute requirements. `Display` prints it for people, serde for programs.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPlan {
    /// Parameters on disk, without adapters.
    pub parameters: u64,
    /// Parameters that train: all of them, or those of adapters.
    pub trainable_parameters: u64,
    /// Model FLOPs per token of a training step.
    pub flops_per_token: f64,
    /// The precision of matmuls and activations.
    pub precision: Precision,
    /// What is computed again in the backward pass.
    pub activation_recompute: ActivationRecompute,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches of an optimizer step.
    pub gradient_accumulation_steps: u64,
    /// Sequences of an optimizer step.
    pub sequences_per_step: u64,
    /// Tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// Sequences of the first optimizer step, and the steps over which they grow, if the batch size warms up.
    pub batch_warmup: Option<(u64, u64)>,
    /// Optimizer steps of the run, where the config says how many.
    pub total_steps: Option<u64>,
    /// Tokens of the run.
    pub total_tokens: Option<u64>,
    /// All planned buffers.
    pub bytes: u64,
    /// The same by what they are for, in the order of a step.
    pub bytes_by_category: Vec<CategoryBytes>,
    /// What there is, where that is known.
    pub budget: Option<Budget>,
    /// Size of a checkpoint directory: the weights, and what the optimizer keeps from step to step.
    pub checkpoint_bytes: u64,
    /// Checkpoints on disk at most: those kept, the best, and the one being written.
    pub checkpoints: u64,
    /// Host memory that saving takes besides the buffers.
    pub saving_bytes: u64,
    /// The part of a step's FLOPs that are the optimizer's GEMMs; none with `AdamW`, which has none.
    pub optimizer_share: Option<f64>,
    /// How long the run takes at a speed that follows from this machine's CPU, or from a GPU's peak for runs that are
    /// meant for one; none for a trainer on a CPU, which need not guess.
    pub estimate: Option<Estimate>,
    /// Why the run does not fit and what would; none if it fits or the budget is unknown.
    pub shortage: Option<Shortage>,
}

/// One line of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    /// What the buffers are for.
    pub category: String,
    /// Their size.
    pub bytes: u64,
}

impl MemoryPlan {
    /// The plan of a run where it would be trained: on the GPU that `runtime.device` names or finds, against what that
    /// has free; else on an RTX 5090 that is assumed, if the run is meant for a GPU or would take this machine months;
    /// else on this machine's CPU. `runtime.memory_limit` holds everywhere. `batch_size: auto` becomes the largest
    /// micro-batch that fits and divides `sequences_per_step`, or one sequence if none does. A plan is made whether it
    /// fits or not: see
    /// [`MemoryPlan::check`].
    ///
    /// # Errors
    /// [`TrainerError::Request`] if the vocabulary's size is not known, or if the run is meant for a GPU that does not take it.
    pub fn new(run: &ResolvedRun) -> Result<Self> {
        // Without a driver or a build for it there is no GPU to plan for; training will say so.
        let gpus = if run.config.runtime.device == run_config::Device::Cpu { Ok(Vec::new()) } else { device::gpus() };
        Self::for_gpus(&run.config, &gpus.unwrap_or_default(), GpuMemory::measure, CpuSpeed::measure)
    }

    /// Like [`MemoryPlan::new`] for a device at hand, and never more than it has free: what a trainer may allocate
    /// here.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`], and when a GPU does not tell its memory.
    pub fn here(run: &ResolvedRun, device: &Device) -> Result<Self> {
        let target = PlanTarget::open(device)?;
        Self::for_target(&run.config, &target, budget::here(&run.config, &target))
    }

    /// Where these GPUs are found, with ways to look at one and to measure the CPU.
    fn for_gpus(
        config: &RunConfig,
        gpus: &[Gpu],
        look: impl Fn(&Gpu) -> GpuMemory,
        measure: impl Fn(&RunConfig) -> Result<CpuSpeed>,
    ) -> Result<Self> {
        let target = PlanTarget::choose(config, gpus, look, measure)?;
        Self::for_target(config, &target, budget::planned(config, &target))
    }

    fn for_target(config: &RunConfig, target: &PlanTarget, budget: Option<Budget>) -> Result<Self> {
        let shape = model_shape(config)?;
        let micro_batch = fit::micro_batch(config, &shape, budget.as_ref(), target.kind());
        let activation_recompute = config.runtime.activation_recompute;
        let settings = EngineSettings { micro_batch, activation_recompute, device: target.kind() };
        let RunBuffers { plan, optimizer, .. } = RunBuffers::new(config, &shape, settings);
        let data = &config.data;
        let parameters = shape.parameter_count();
        let work = Workload::new(config)?;
        let categories = plan.by_category();
        let shortage = budget
            .as_ref()
            .filter(|budget| budget.bytes < plan.bytes())
            .map(|budget| fit::shortage(config, &shape, settings, budget));
        Ok(Self {
            parameters,
            trainable_parameters: shape.trainable_parameter_count(),
            flops_per_token: work.flops_per_token,
            precision: config.runtime.precision,
            activation_recompute: config.runtime.activation_recompute,
            sequence_length: data.sequence_length as u64,
            micro_batch: micro_batch as u64,
            gradient_accumulation_steps: (data.sequences_per_step / micro_batch) as u64,
            sequences_per_step: data.sequences_per_step as u64,
            tokens_per_step: data.tokens_per_step() as u64,
            batch_warmup: (config.scheduler.batch_warmup_steps > 0)
                .then(|| (sequences_at(config, 1) as u64, config.scheduler.batch_warmup_steps)),
            total_steps: config.scheduler.total_steps,
            total_tokens: work.total_tokens,
            bytes: plan.bytes(),
            bytes_by_category: categories
                .into_iter()
                .map(|(category, bytes)| CategoryBytes { category: category.to_string(), bytes })
                .collect(),
            budget,
            checkpoint_bytes: checkpoint::expected_bytes(&shape, dtype_of(config.runtime.precision), optimizer.state()),
            checkpoints: (config.runtime.checkpoint.max_keep + config.runtime.evaluation.best.max_keep + 1) as u64,
            saving_bytes: SAVING_BYTES,
            optimizer_share: work.optimizer_share(),
            estimate: target.estimate(work),
            shortage,
        })
    }

    /// Refuses a plan that is larger than what there is.
    ///
    /// # Errors
    /// [`TrainerError::OutOfMemory`] with the largest settings that would fit.
    pub fn check(&self) -> Result<()> {
        match &self.shortage {
            None => Ok(()),
            Some(shortage) => Err(TrainerError::OutOfMemory(Box::new(shortage.clone()))),
        }
    }

    /// What the plan's buffers are made for.
    pub fn engine_settings(&self, device: DeviceKind) -> EngineSettings {
        let &Self { micro_batch, activation_recompute, .. } = self;
        EngineSettings { micro_batch: micro_batch as usize, activation_recompute, device }
    }
}
