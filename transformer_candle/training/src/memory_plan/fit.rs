//! What would fit: the micro-batch that `auto` stands for, and the advice to a run that was refused.

use kernels::DeviceKind;
use model::ModelShape;
use run_config::{ActivationRecompute, BatchSize, RunConfig};

use super::{
    FittingMicroBatch,
    speed::{SpeedModel, StepOf},
};
use crate::{
    engine::{EngineSettings, RunBuffers},
    error::{Budget, MemoryRequirement, Shortage},
};

/// Most tokens per micro-batch of `auto` on a CPU: matmuls reach full speed well below, and the choice does not depend
/// on the memory of larger machines.
const TOKENS_OF_CPU_MICRO_BATCH: usize = 8192;

/// From the fastest to the most frugal.
pub(super) const RECOMPUTES: [ActivationRecompute; 3] =
    [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Block];

/// The micro-batch of a config: its own, or what `auto` stands for.
pub(super) fn micro_batch(
    config: &RunConfig,
    shape: &ModelShape,
    budget: Option<&Budget>,
    device: DeviceKind,
) -> usize {
    match config.data.batch_size {
        BatchSize::Fixed(sequences) => sequences,
        BatchSize::Auto => {
            let available = budget.map_or(u64::MAX, |budget| budget.bytes);
            let activation_recompute = config.runtime.activation_recompute;
            let most = EngineSettings { micro_batch: most_sequences(config, device), activation_recompute, device };
            largest(config, shape, most, available).map_or(1, |fit| fit.micro_batch)
        }
    }
}

/// Sequences of the largest micro-batch that is worth having.
pub(super) fn most_sequences(config: &RunConfig, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => (TOKENS_OF_CPU_MICRO_BATCH / config.data.sequence_length).max(1),
        DeviceKind::Cuda => config.data.sequences_per_step,
    }
}

/// The largest micro-batch that fits for each recompute mode, with its speed; those that do not fit at all left out.
pub(super) fn largest_micro_batches(
    step: StepOf<'_>,
    budget: Option<&Budget>,
    model: Option<&SpeedModel>,
) -> Vec<FittingMicroBatch> {
    let StepOf { config, shape, settings } = step;
    let Some(budget) = budget else { return Vec::new() };
    let micro_batch = most_sequences(config, settings.device);
    let of_mode = |activation_recompute| {
        let most = EngineSettings { micro_batch, activation_recompute, ..settings };
        let requirement = largest(config, shape, most, budget.bytes)?;
        let settings = EngineSettings { micro_batch: requirement.micro_batch, ..most };
        let tokens_per_second = model.map(|model| model.speed(StepOf { settings, ..step }).tokens_per_second);
        Some(FittingMicroBatch { requirement, tokens_per_second })
    };
    RECOMPUTES.into_iter().filter_map(of_mode).collect()
}

/// The largest micro-batch up to that of `most` that divides the step's sequences and fits.
pub(super) fn largest(
    config: &RunConfig,
    shape: &ModelShape,
    most: EngineSettings,
    available: u64,
) -> Option<MemoryRequirement> {
    let sequences = config.data.sequences_per_step;
    (1..=most.micro_batch.min(sequences))
        .rev()
        .filter(|micro_batch| sequences.is_multiple_of(*micro_batch))
        .map(|micro_batch| needed(config, shape, EngineSettings { micro_batch, ..most }))
        .find(|fit| fit.bytes <= available)
}

pub(super) fn needed(config: &RunConfig, shape: &ModelShape, settings: EngineSettings) -> MemoryRequirement {
    let EngineSettings { micro_batch, activation_recompute, .. } = settings;
    MemoryRequirement {
        micro_batch,
        activation_recompute,
        bytes: RunBuffers::new(config, shape, settings).plan.bytes(),
    }
}

/// What a run that was asked for with these settings lacks.
pub(super) fn shortage(config: &RunConfig, shape: &ModelShape, asked: EngineSettings, budget: &Budget) -> Shortage {
    let mut fits: Vec<MemoryRequirement> = RECOMPUTES
        .into_iter()
        .skip_while(|recompute| *recompute != asked.activation_recompute)
        .filter_map(|activation_recompute| {
            largest(config, shape, EngineSettings { activation_recompute, ..asked }, budget.bytes)
        })
        .collect();
    // Recomputing more is worth it only for a larger micro-batch.
    fits.dedup_by(|more, less| more.micro_batch <= less.micro_batch);
    let smallest = EngineSettings { micro_batch: 1, activation_recompute: ActivationRecompute::Block, ..asked };
    Shortage {
        asked: needed(config, shape, asked),
        budget: budget.clone(),
        fits,
        smallest: needed(config, shape, smallest),
    }
}
