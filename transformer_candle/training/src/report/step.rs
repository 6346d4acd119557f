//! The result of one optimizer step, and which steps are logged.

use super::{
    ranks::RankTimes,
    scalar::{Record, Scalar},
};
use crate::units::grouped;

/// The result of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Optimizer steps taken, this one included.
    pub step: u64,
    /// Mean over the step's target tokens, nats, before the update.
    pub loss: f32,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Global norm of the gradients before clipping. Where it is not finite, the step changed no weight.
    pub grad_norm: f32,
    /// Target tokens trained on since the run began.
    pub tokens: u64,
    /// Target tokens per second of this step, those of all ranks together.
    pub tokens_per_second: f64,
    /// Positions per second that the model computed, whether they have a target or not. Padding has none, and of
    /// conversations only what the assistant says has: there they are more than the target tokens.
    pub positions_per_second: f64,
    /// Model FLOPs of all positions over the nominal dense BF16 peak of the GPU, or of all ranks' GPUs; none where no
    /// peak is known, as on a CPU.
    pub mfu: Option<f64>,
    /// Wall time of the step.
    pub step_seconds: f64,
    /// Seconds of it spent waiting for data, by the rank that waited longest.
    pub data_wait_seconds: f64,
    /// Seconds spent saving checkpoints between the step before and this one; in `metrics.jsonl` since the line before.
    pub save_seconds: f64,
    /// Seconds spent evaluating, samples included, in the same time.
    pub evaluation_seconds: f64,
    /// Bytes of the planned buffers, of the rank with the most: what `plan` printed and the trainer allocated.
    pub memory_bytes: u64,
    /// The ranks' times; none where there is one process.
    pub ranks: Option<RankTimes>,
}

impl StepReport {
    /// Formats the tokens/s and, where not every position has a target, the positions/s.
    pub(crate) fn rates(&self) -> impl Iterator<Item = String> {
        let tokens = format!("{} tokens/s", grouped(self.tokens_per_second as u64));
        let has_more_positions = self.positions_per_second > self.tokens_per_second;
        let positions =
            has_more_positions.then(|| format!("{} positions/s", grouped(self.positions_per_second as u64)));
        std::iter::once(tokens).chain(positions)
    }

    /// Returns the logged numbers of a step, without the step itself.
    pub fn scalars(&self) -> Vec<Scalar> {
        let mut scalars = vec![
            Scalar::curve("loss", "loss/train", self.loss),
            Scalar::curve("learning_rate", "learning_rate", self.learning_rate),
            Scalar::curve("grad_norm", "gradient_norm", self.grad_norm),
            Scalar::plain("tokens", self.tokens),
            Scalar::curve("tokens_per_second", "tokens_per_second", self.tokens_per_second),
            Scalar::curve("positions_per_second", "positions_per_second", self.positions_per_second),
            Scalar::optional_curve("mfu", "mfu", self.mfu),
            Scalar::curve("step_seconds", "step_seconds", self.step_seconds),
            Scalar::curve("data_wait_seconds", "data_wait_seconds", self.data_wait_seconds),
            Scalar::curve("save_seconds", "save_seconds", self.save_seconds),
            Scalar::curve("evaluation_seconds", "evaluation_seconds", self.evaluation_seconds),
            Scalar::curve("memory_bytes", "memory_bytes", self.memory_bytes),
        ];
        scalars.extend(self.ranks.iter().flat_map(RankTimes::scalars));
        scalars
    }

    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let series = self.ranks.iter().map(RankTimes::series).collect();
        Record { scalars: self.scalars(), series, ..Record::new("train", self.step) }
    }
}

/// Decides which steps are logged: the first, every `log_every_n_steps`th and the last. Metrics and plain progress
/// lines use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogInterval {
    every: u64,
    last_step: Option<u64>,
}

impl LogInterval {
    /// Returns the interval of a run; `last_step` is its final step, if known beforehand.
    pub(crate) fn new(every: u64, last_step: Option<u64>) -> Self {
        Self { every: every.max(1), last_step }
    }

    pub(crate) fn includes(self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.every) || self.last_step == Some(step)
    }
}
