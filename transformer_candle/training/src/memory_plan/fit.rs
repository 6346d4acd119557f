//! What would fit: the micro-batch that `auto` stands for, and the advice to a run that was refused.

use kernels::DeviceKind;
use model::ModelShape;
use run_config::{ActivationRecompute, BatchSize, RunConfig};

use super::{FittingMicroBatch, speed::SpeedModel};
use crate::{
    engine::{EngineSettings, Parts, StepOf},
    error::{Budget, MemoryRequirement, Shortage},
    ranks::RankInfo,
};

/// Most tokens per micro-batch of `auto` on a CPU: matmuls reach full speed well below, and the choice does not depend
/// on the memory of larger machines.
const TOKENS_OF_CPU_MICRO_BATCH: usize = 8192;

/// The recompute modes, from the fastest to the one that takes the least memory.
pub(super) const RECOMPUTES: [ActivationRecompute; 3] =
    [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Block];

/// Returns each stage's micro-batch: the config's, or for `auto` the largest that fits beside those of other stages.
pub(super) fn micro_batches(
    stages: &[RunConfig],
    shape: &ModelShape,
    budget: Option<&Budget>,
    device: DeviceKind,
    rank_info: RankInfo,
) -> Vec<usize> {
    let fixed_size = |config: &RunConfig| match config.data.batch_size {
        BatchSize::Fixed(sequences) => Some(sequences),
        BatchSize::Auto => None,
    };
    let mut chosen: Vec<usize> = stages.iter().map(|config| fixed_size(config).unwrap_or(1)).collect();
    let available = budget.map_or(u64::MAX, |budget| budget.bytes);
    for (stage, config) in stages.iter().enumerate().filter(|(_, config)| fixed_size(config).is_none()) {
        let activation_recompute = config.runtime.activation_recompute;
        let settings = |micro_batch| EngineSettings { micro_batch, activation_recompute, device, rank_info };
        let steps: Vec<_> = stages
            .iter()
            .zip(&chosen)
            .map(|(config, &chosen)| StepOf { config, shape, settings: settings(chosen) })
            .collect();
        let largest = largest(&steps, stage, settings(most_sequences(config, device)), available);
        chosen[stage] = largest.map_or(1, |fit| fit.micro_batch);
    }
    chosen
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
    let StepOf { config, settings, .. } = step;
    let Some(budget) = budget else { return Vec::new() };
    let micro_batch = most_sequences(config, settings.device);
    let of_mode = |activation_recompute| {
        let most = EngineSettings { micro_batch, activation_recompute, ..settings };
        let requirement = largest(&[step], 0, most, budget.bytes)?;
        let settings = EngineSettings { micro_batch: requirement.micro_batch, ..most };
        let tokens_per_second = model.map(|model| model.speed(StepOf { settings, ..step }).tokens_per_second);
        Some(FittingMicroBatch { requirement, tokens_per_second })
    };
    RECOMPUTES.into_iter().filter_map(of_mode).collect()
}

/// Returns the largest micro-batch of a stage, up to that of `most`, that divides a rank's (or a virtual shard's)
/// sequences of a step and fits beside the other stages.
pub(super) fn largest(
    steps: &[StepOf<'_>],
    stage: usize,
    most: EngineSettings,
    available: u64,
) -> Option<MemoryRequirement> {
    let config = steps[stage].config;
    let shards = config.runtime.deterministic_reduction.unwrap_or(most.rank_info.world_size);
    let sequences = config.data.sequences_per_step / shards;
    (1..=most.micro_batch.min(sequences))
        .rev()
        .filter(|micro_batch| sequences.is_multiple_of(*micro_batch))
        .map(|micro_batch| requirement(steps, stage, EngineSettings { micro_batch, ..most }))
        .find(|fit| fit.bytes <= available)
}

/// Returns what the run needs if one of its stages has these settings; all stages use the same recompute mode.
fn requirement(steps: &[StepOf<'_>], stage: usize, settings: EngineSettings) -> MemoryRequirement {
    let EngineSettings { micro_batch, activation_recompute, .. } = settings;
    let mut steps = steps.to_vec();
    for step in &mut steps {
        step.settings.activation_recompute = activation_recompute;
    }
    steps[stage].settings = settings;
    MemoryRequirement { micro_batch, activation_recompute, bytes: Parts::count(&steps).1.bytes() }
}

/// The stage that would need the most memory alone, the first of several.
pub(super) fn largest_stage(steps: &[StepOf<'_>]) -> usize {
    let sizes: Vec<u64> = steps.iter().map(|step| step.bytes()).collect();
    (0..sizes.len()).rev().max_by_key(|&stage| sizes[stage]).unwrap_or(0)
}

/// Describes why a run with these settings does not fit, and what would. Of a run in stages it names the largest one.
pub(super) fn shortage(steps: &[StepOf<'_>], budget: &Budget) -> Shortage {
    let stage = largest_stage(steps);
    let requested_settings = steps[stage].settings;
    let mut fits: Vec<MemoryRequirement> = RECOMPUTES
        .into_iter()
        .skip_while(|recompute| *recompute != requested_settings.activation_recompute)
        .filter_map(|activation_recompute| {
            largest(steps, stage, EngineSettings { activation_recompute, ..requested_settings }, budget.bytes)
        })
        .collect();
    // Recomputing more is worth it only for a larger micro-batch.
    fits.dedup_by(|more, less| more.micro_batch <= less.micro_batch);
    let smallest =
        EngineSettings { micro_batch: 1, activation_recompute: ActivationRecompute::Block, ..requested_settings };
    Shortage {
        stage: (steps.len() > 1).then_some(stage),
        asked: requirement(steps, stage, requested_settings),
        budget: budget.clone(),
        fits,
        smallest: requirement(steps, stage, smallest),
    }
}
