//! The stages of a run in its plan.

use kernels::DeviceKind;
use run_config::RunConfig;
use serde::Serialize;

use super::{
    MemoryPlan,
    speed::{Speed, SpeedModel},
};
use crate::engine::{EngineSettings, StepOf};

/// A stage of a run: its steps, and what its buffers alone would take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlan {
    /// The first step, from 1.
    pub first_step: u64,
    /// The last step, if no stage starts late because it waits for the end of a shuffle window.
    pub last_step: u64,
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
    /// Tokens of the stage.
    pub tokens: u64,
    /// Peak of the learning rate's schedule in this stage.
    pub learning_rate: f64,
    /// Model FLOPs per token of a training step.
    pub flops_per_token: f64,
    /// Bytes of all buffers of a run of this stage alone.
    pub bytes: u64,
    /// How fast it trains, where that is known.
    pub speed: Option<Speed>,
}

/// Plans the stages of a config that has some, whose steps are `steps`.
pub(super) fn plan(config: &RunConfig, steps: &[StepOf<'_>], model: Option<&SpeedModel>) -> Vec<StagePlan> {
    let ends = config.stage_ends();
    let firsts = std::iter::once(1).chain(ends.iter().map(|end| end + 1));
    let stages = steps.iter().zip(firsts.zip(&ends));
    let stages = stages.map(|(step, (first_step, &last_step))| {
        let (data, micro_batch) = (&step.config.data, step.settings.micro_batch);
        let tokens_per_step = data.tokens_per_step() as u64;
        StagePlan {
            first_step,
            last_step,
            sequence_length: data.sequence_length as u64,
            micro_batch: micro_batch as u64,
            gradient_accumulation_steps: (data.sequences_per_step / micro_batch) as u64,
            sequences_per_step: data.sequences_per_step as u64,
            tokens_per_step,
            tokens: (last_step + 1 - first_step).saturating_mul(tokens_per_step),
            learning_rate: step.config.optimizer.learning_rate,
            flops_per_token: step.shape.flops_per_token(data.sequence_length),
            bytes: step.bytes(),
            speed: model.map(|model| model.speed(*step)),
        }
    });
    stages.collect()
}

/// Tokens of all stages.
pub(super) fn tokens(stages: &[StagePlan]) -> u64 {
    stages.iter().fold(0, |sum: u64, stage| sum.saturating_add(stage.tokens))
}

/// Seconds of the steps of all stages, pessimistic and optimistic, where their speed is known.
pub(super) fn seconds(stages: &[StagePlan]) -> Option<[f64; 2]> {
    let seconds = |stage: &StagePlan| {
        let steps = (stage.last_step + 1 - stage.first_step) as f64;
        stage.speed.as_ref().map(|speed| speed.step_seconds.map(|seconds| steps * seconds))
    };
    let of_stages: Vec<[f64; 2]> = stages.iter().map(seconds).collect::<Option<_>>()?;
    let sum = |end: usize| of_stages.iter().map(|seconds| seconds[end]).sum();
    (!of_stages.is_empty()).then(|| [sum(0), sum(1)])
}

impl MemoryPlan {
    /// Returns the settings that each stage's buffers are made for; one for a run without stages.
    pub(crate) fn stage_settings(&self, device: DeviceKind) -> Vec<EngineSettings> {
        let settings = self.engine_settings(device);
        let micro_batches = self.stages.iter().map(|stage| stage.micro_batch as usize);
        let stages: Vec<_> = micro_batches.map(|micro_batch| EngineSettings { micro_batch, ..settings }).collect();
        if stages.is_empty() { vec![settings] } else { stages }
    }

    /// The last step of each stage and the FLOPs of one of its steps; empty without stages.
    pub(crate) fn stage_costs(&self) -> Vec<(u64, f64)> {
        let cost = |stage: &StagePlan| (stage.last_step, stage.tokens_per_step as f64 * stage.flops_per_token);
        self.stages.iter().map(cost).collect()
    }

    /// Target tokens of an optimizer step of a stage.
    pub(crate) fn tokens_per_step_of(&self, stage: usize) -> u64 {
        self.stages.get(stage).map_or(self.tokens_per_step, |stage| stage.tokens_per_step)
    }

    /// Model FLOPs per token of a training step of a stage.
    pub(crate) fn flops_per_token_of(&self, stage: usize) -> f64 {
        self.stages.get(stage).map_or(self.flops_per_token, |stage| stage.flops_per_token)
    }
}
