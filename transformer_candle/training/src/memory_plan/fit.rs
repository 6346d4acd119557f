//! What would fit: the micro-batch that `auto` stands for, and the advice to a run that was refused.

use std::fmt;

use kernels::DeviceKind;
use model::ModelShape;
use run_config::{ActivationRecompute, BatchSize, RunConfig};
use serde::Serialize;

use super::{Budget, RunBuffers, Setting, display};

/// On a CPU `auto` goes no further than this many tokens a micro-batch: matrix products are as fast as they get well below,
/// and the choice stays the same on machines with more memory.
const TOKENS_OF_CPU_MICRO_BATCH: usize = 8192;

/// From the fastest to the most frugal.
const RECOMPUTES: [ActivationRecompute; 3] =
    [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Block];

/// Settings that fit, and what they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// `data.batch_size`.
    pub micro_batch: usize,
    /// `runtime.activation_recompute`.
    pub activation_recompute: ActivationRecompute,
    /// All planned buffers.
    pub bytes: u64,
}

/// A run that does not fit, and the largest settings that would.
#[derive(Clone, Debug, Serialize)]
pub struct Shortage {
    /// What was asked for.
    pub asked: Fit,
    /// What there is.
    pub budget: Budget,
    /// The largest micro-batch for each way to recompute that saves no less than the one asked for. Empty if nothing fits.
    pub fits: Vec<Fit>,
    /// What one sequence at a time needs, everything recomputed.
    pub smallest: Fit,
}

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
            let limit = match device {
                DeviceKind::Cpu => (TOKENS_OF_CPU_MICRO_BATCH / config.data.sequence_length).max(1),
                DeviceKind::Cuda => config.data.sequences_per_step,
            };
            let available = budget.map_or(u64::MAX, |budget| budget.bytes);
            let activation_recompute = config.runtime.activation_recompute;
            let most = Setting { micro_batch: limit, activation_recompute, device };
            largest(config, shape, most, available).map_or(1, |fit| fit.micro_batch)
        }
    }
}

/// The largest micro-batch up to that of `most` that divides the step's sequences and fits.
fn largest(config: &RunConfig, shape: &ModelShape, most: Setting, available: u64) -> Option<Fit> {
    let sequences = config.data.sequences_per_step;
    (1..=most.micro_batch.min(sequences))
        .rev()
        .filter(|micro_batch| sequences.is_multiple_of(*micro_batch))
        .map(|micro_batch| needed(config, shape, Setting { micro_batch, ..most }))
        .find(|fit| fit.bytes <= available)
}

fn needed(config: &RunConfig, shape: &ModelShape, setting: Setting) -> Fit {
    let Setting { micro_batch, activation_recompute, .. } = setting;
    Fit { micro_batch, activation_recompute, bytes: RunBuffers::of(config, shape, setting).plan.bytes() }
}

impl Shortage {
    pub(super) fn of(config: &RunConfig, shape: &ModelShape, asked: Setting, budget: &Budget) -> Self {
        let mut fits: Vec<Fit> = RECOMPUTES
            .into_iter()
            .skip_while(|recompute| *recompute != asked.activation_recompute)
            .filter_map(|activation_recompute| {
                largest(config, shape, Setting { activation_recompute, ..asked }, budget.bytes)
            })
            .collect();
        // Recomputing more is worth it only for a larger micro-batch.
        fits.dedup_by(|more, less| more.micro_batch <= less.micro_batch);
        let smallest = Setting { micro_batch: 1, activation_recompute: ActivationRecompute::Block, ..asked };
        Self {
            asked: needed(config, shape, asked),
            budget: budget.clone(),
            fits,
            smallest: needed(config, shape, smallest),
        }
    }
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "data.batch_size={} with runtime.activation_recompute={} ({})",
            self.micro_batch,
            display::recompute(self.activation_recompute),
            display::bytes(self.bytes)
        )
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((needed, without)) = self.budget.data_stream
            && self.fits.is_empty()
            && self.smallest.bytes <= without
        {
            let (needed, without) = (display::bytes(needed), display::bytes(without));
            return write!(
                f,
                "the data stream of this run does not fit: it needs {needed} of the {without} that are free on this machine, \
                 and the model's buffers {}. Lower data.num_workers or data.shuffle_buffer_size",
                display::bytes(self.asked.bytes)
            );
        }
        write!(f, "this run does not fit: {} is more than the {} there are. ", self.asked, self.budget)?;
        if self.fits.is_empty() {
            return write!(
                f,
                "Not even {} would fit: take a smaller model, a shorter data.sequence_length, or more memory",
                self.smallest
            );
        }
        f.write_str("What would fit: ")?;
        for (index, fit) in self.fits.iter().enumerate() {
            write!(f, "{}{fit}", if index == 0 { "" } else { ", or " })?;
        }
        f.write_str("; data.sequences_per_step stays the same, and with it the result up to rounding")
    }
}
