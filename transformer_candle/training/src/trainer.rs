//! The trainer: one optimizer step a call, over buffers that were all allocated before the first.

use serde::{Deserialize, Serialize};

/// What one optimizer step did. A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Optimizer steps taken, this one included.
    pub step: u64,
    /// Mean over the step's target tokens, nats, before the update.
    pub loss: f32,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Target tokens trained on since the run began.
    pub tokens: u64,
    /// Target tokens of this step over its seconds.
    pub tokens_per_second: f64,
    /// Model FLOPs over the device's peak; none where no peak is known, as on a CPU.
    pub mfu: Option<f64>,
    /// Wall time of the step.
    pub step_seconds: f64,
    /// Part of it spent waiting for data.
    pub data_wait_seconds: f64,
    /// Bytes of the planned buffers: what `plan` printed and the trainer allocated.
    pub memory_bytes: u64,
}
