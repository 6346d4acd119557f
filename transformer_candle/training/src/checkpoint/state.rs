//! `trainer_state.json`: everything a run needs to go on that is not a tensor.

use std::collections::BTreeMap;
use std::path::Path;

use dataset::ledger::LedgerHead;
use run_config::ActivationRecompute;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::files::pretty;
use crate::error::checkpoint::{CheckpointError, Result};

/// The one format this program writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// The trainer's state at a checkpoint. It holds no clock and no host name: the same run writes the same bytes (on a GPU, with the
/// same choices of products).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// [`FORMAT_VERSION`] when it was written.
    pub format_version: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Target tokens trained on so far.
    pub tokens: u64,
    /// Where the data stream stands ([`dataset`]'s cursor, O(lanes) bytes).
    pub cursor: Value,
    /// The run's seed.
    pub seed: u64,
    /// What may not change on resume, key by key, so that a refusal can name the key.
    pub identity: BTreeMap<String, Value>,
    /// The held-out loss measured at this very step, if it was; the checkpoints with the lowest are kept.
    pub evaluation_loss: Option<f64>,
    /// The best evaluation so far, if there was one.
    pub best: Option<BestEvaluation>,
    /// How its steps are computed; none in checkpoints from before it was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    /// How a GPU computed matrix products; none on a CPU.
    #[serde(default)]
    pub products: Option<Products>,
    /// How far the run's ledger is vouched for; none in checkpoints from before there was one.
    #[serde(default)]
    pub ledger: Option<LedgerHead>,
}

/// How an optimizer step is computed. Each way rounds a little differently: a run is resumed bit for bit only with the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execution {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step.
    pub gradient_accumulation_steps: usize,
    /// What is computed again in the backward pass.
    pub activation_recompute: ActivationRecompute,
}

impl Execution {
    /// Sequences of an optimizer step.
    pub fn sequences_per_step(&self) -> usize {
        self.micro_batch * self.gradient_accumulation_steps
    }
}

/// How a GPU computes matrix products. The choices are found by measuring, and each rounds a little differently: a run goes on bit
/// for bit only with the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Products {
    /// The GPU and the libraries that the choices are for.
    pub fingerprint: String,
    /// The choice for each product that was computed.
    pub choices: BTreeMap<String, String>,
}

/// The lowest held-out loss seen, and where.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestEvaluation {
    /// The step it was measured at.
    pub step: u64,
    /// Mean nats a token.
    pub loss: f64,
}

impl TrainerState {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        pretty(self)
    }

    pub(super) fn from_bytes(directory: &Path, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let unreadable =
            |error: serde_json::Error| CheckpointError::damaged(directory, format!("trainer_state.json: {error}"));
        let Version { format_version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if format_version != FORMAT_VERSION {
            return Err(CheckpointError::mismatch(
                directory,
                format!("its format is {format_version}, this program reads {FORMAT_VERSION}"),
            ));
        }
        serde_json::from_slice(bytes).map_err(unreadable)
    }
}
