//! The error of a run that does not fit in memory, with the settings that would.

use std::fmt;

use run_config::ActivationRecompute;
use serde::Serialize;

use crate::units::bytes;

/// An amount of memory and where the number comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// Bytes that the planned buffers may take.
    pub bytes: u64,
    /// Where the number comes from, such as `runtime.memory_limit: 24GB`.
    pub origin: String,
    /// Bytes that the data stream takes, and bytes available without it; none where they are not subtracted.
    #[serde(skip)]
    pub(crate) data_stream: Option<(u64, u64)>,
}

/// A micro-batch and a recompute mode, and the memory that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryRequirement {
    /// `data.batch_size`.
    pub micro_batch: usize,
    /// `runtime.activation_recompute`.
    pub activation_recompute: ActivationRecompute,
    /// Bytes of all planned buffers.
    pub bytes: u64,
}

/// A run that does not fit, and the largest settings that would.
#[derive(Clone, Debug, Serialize)]
pub struct Shortage {
    /// The stage that the settings belong to, from 0; none for a run without stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
    /// The settings that were asked for, and what they need.
    pub asked: MemoryRequirement,
    /// The memory that is available.
    pub budget: Budget,
    /// The largest micro-batch for each way to recompute that saves no less than the one asked for. Empty if nothing
    /// fits.
    pub fits: Vec<MemoryRequirement>,
    /// What a micro-batch of one sequence needs with everything recomputed.
    pub smallest: MemoryRequirement,
}

/// Returns the name of a recompute mode in a config.
pub(crate) fn recompute(recompute: ActivationRecompute) -> &'static str {
    match recompute {
        ActivationRecompute::None => "none",
        ActivationRecompute::Selective => "selective",
        ActivationRecompute::Block => "block",
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", bytes(self.bytes), self.origin)
    }
}

impl MemoryRequirement {
    /// Formats the settings as config keys, `batch_size` in this section, and the bytes that they need.
    fn described(&self, section: &str) -> String {
        format!(
            "{section}.batch_size={} with runtime.activation_recompute={} ({})",
            self.micro_batch,
            recompute(self.activation_recompute),
            bytes(self.bytes)
        )
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((needed_bytes, free_bytes)) = self.budget.data_stream
            && self.fits.is_empty()
            && self.smallest.bytes <= free_bytes
        {
            let (needed_bytes, free_bytes) = (bytes(needed_bytes), bytes(free_bytes));
            return write!(
                f,
                "the data stream of this run does not fit: it needs {needed_bytes} of the {free_bytes} free on this \
                 machine, and the model's buffers {}. Lower data.num_workers or data.shuffle_buffer_size",
                bytes(self.asked.bytes)
            );
        }
        let section = self.stage.map_or("data".to_owned(), |stage| format!("stages[{stage}]"));
        let described = |requirement: &MemoryRequirement| requirement.described(&section);
        write!(f, "this run does not fit: {} exceeds the available {}. ", described(&self.asked), self.budget)?;
        if self.fits.is_empty() {
            return write!(
                f,
                "Not even {} would fit: take a smaller model, a shorter {section}.sequence_length, or more memory",
                described(&self.smallest)
            );
        }
        f.write_str("What would fit: ")?;
        for (index, fit) in self.fits.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { ", or " }, described(fit))?;
        }
        write!(f, "; {section}.sequences_per_step stays the same, and with it the result up to rounding")
    }
}
