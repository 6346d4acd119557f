//! `scheduler`: length of the training, and the learning rate schedule.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Length of the training, and the learning rate schedule. Every strategy starts with a linear
/// warm-up from zero.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// Learning rate schedule after the warm-up. Default: `cosine`; with `total_epochs`, whose number
    /// of steps is unknown, `constant`.
    pub strategy: ScheduleStrategy,
    /// Optimizer steps of the linear warm-up to `optimizer.learning_rate`, fewer than all steps.
    /// Default: a twentieth of `total_steps`, at most 2000; with `total_epochs`, 100.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Optimizer steps of the training; either this or `total_epochs`. About 20 tokens per parameter
    /// are compute-optimal (Hoffmann et al., 2022): `20 * parameters / (sequences_per_step *
    /// sequence_length)` steps. More tokens make a better model of the same size.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub total_steps: Option<u64>,
    /// Passes over the training text, instead of `total_steps`; only with the strategy `constant`, as
    /// the number of steps is unknown. A stream needs `max_samples`, or it has no end.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub total_epochs: Option<u64>,
    /// Learning rate at the end of the decay. Default: a tenth of `optimizer.learning_rate`.
    #[schemars(range(min = 0, max = 1))]
    pub min_lr: f64,
    /// Steps of the final decay of `wsd`; other strategies ignore it. Default: `decay_fraction` of all
    /// steps.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub decay_steps: Option<u64>,
    /// Fraction of all steps that is the final decay of `wsd`, unless `decay_steps` is given.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub decay_fraction: f64,
    /// Optimizer steps over which the sequences per step grow linearly from `batch_warmup_start` to
    /// `data.sequences_per_step`: small batches learn as much per token while the loss falls fast
    /// (Brown et al., 2020). 0: every step has `data.sequences_per_step`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub batch_warmup_steps: u64,
    /// Sequences of the first step of the batch-size warm-up. Default: an eighth of
    /// `data.sequences_per_step`, rounded up.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub batch_warmup_start: Option<usize>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            strategy: ScheduleStrategy::Cosine,
            warmup_steps: 30,
            total_steps: Some(600),
            total_epochs: None,
            min_lr: 3e-5,
            decay_steps: None,
            decay_fraction: 0.2,
            batch_warmup_steps: 0,
            batch_warmup_start: None,
        }
    }
}

impl SchedulerConfig {
    /// Steps of the final decay of `wsd` in a training of `total_steps`.
    pub fn decay_steps_of(&self, total_steps: u64) -> u64 {
        self.decay_steps.unwrap_or_else(|| ((total_steps as f64 * self.decay_fraction).round() as u64).max(1))
    }
}

/// Learning rate schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleStrategy {
    /// Half a cosine down to `min_lr` at the last step.
    Cosine,
    /// Linear decay to `min_lr` at the last step.
    Linear,
    /// `optimizer.learning_rate` throughout.
    Constant,
    /// Warm-up, stable, decay: constant, then linear decay to `min_lr` in the last `decay_steps`.
    Wsd,
}
