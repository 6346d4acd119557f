//! `scheduler`: how long training lasts and how the learning rate moves.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How long training lasts and how the learning rate moves. Every strategy starts with a linear
/// warm-up from zero.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// What the learning rate does after the warm-up. Left out: `cosine`; with `total_epochs`,
    /// whose end is not known beforehand, `constant`.
    pub strategy: ScheduleStrategy,
    /// Optimizer steps in which the learning rate rises linearly to `optimizer.learning_rate`. Less
    /// than the whole training. Left out: a twentieth of `total_steps`, at most 2000; with
    /// `total_epochs`: 100.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Optimizer steps of the whole training. Give this or `total_epochs`. About 20 tokens a
    /// parameter use the compute best (Hoffmann et al., 2022): `20 * parameters /
    /// (sequences_per_step * sequence_length)` steps; more tokens make a better model of the same
    /// size.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub total_steps: Option<u64>,
    /// Passes over the training text, instead of `total_steps`; only with the strategy `constant`,
    /// as nobody knows beforehand how many steps they are. A stream needs `max_samples` for it,
    /// else it has no end.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub total_epochs: Option<u64>,
    /// Learning rate at the end of the decay. Left out: a tenth of `optimizer.learning_rate`.
    #[schemars(range(min = 0, max = 1))]
    pub min_lr: f64,
    /// Steps of the final decay of `wsd`; the other strategies do not read it. Left out:
    /// `decay_fraction` of the whole training.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub decay_steps: Option<u64>,
    /// Share of the whole training that the final decay of `wsd` takes where `decay_steps` is left
    /// out.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub decay_fraction: f64,
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
        }
    }
}

impl SchedulerConfig {
    /// Steps of the final decay of `wsd` in a training of `total_steps`.
    pub fn decay_steps_of(&self, total_steps: u64) -> u64 {
        self.decay_steps.unwrap_or_else(|| ((total_steps as f64 * self.decay_fraction).round() as u64).max(1))
    }
}

/// What the learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleStrategy {
    /// Falls along half a cosine to `min_lr` at the last step.
    Cosine,
    /// Falls in a straight line to `min_lr` at the last step.
    Linear,
    /// Stays at `optimizer.learning_rate`.
    Constant,
    /// Warm-up, stable, decay: stays, then falls in a straight line to `min_lr` in the last
    /// `decay_steps`.
    Wsd,
}
