//! `trainer_state.json`: everything a run needs to resume that is not a tensor.

use std::collections::BTreeMap;
use std::path::Path;

use dataset::ledger::LedgerHead;
use run_config::{ActivationRecompute, Precision};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::files::pretty;
use crate::config_fingerprint::{self, ConfigFingerprint};
use crate::error::checkpoint::{CheckpointError, Result};

/// The format version that this program writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// The trainer's state at a checkpoint. It holds neither time nor host name: the same run writes the same bytes (on a
/// GPU, with the same GEMM algorithms; on a CPU in bf16, with the same units).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// [`FORMAT_VERSION`] when it was written.
    pub format_version: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// The stage of that step, from 0; 0 is not written.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stage: u64,
    /// Target tokens trained on so far.
    pub tokens: u64,
    /// The data stream's position ([`dataset`]'s cursor).
    pub cursor: Value,
    /// The run's seed.
    pub seed: u64,
    /// The settings that must not change on resume, by config key.
    #[serde(rename = "identity")]
    pub fingerprint: ConfigFingerprint,
    /// The held-out loss at this step, if it was evaluated; the checkpoints with the lowest are kept.
    pub evaluation_loss: Option<f64>,
    /// The best evaluation so far, if there was one.
    pub best: Option<BestEvaluation>,
    /// When the held-out loss last improved; none without `runtime.evaluation.patience`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub improvement: Option<Improvement>,
    /// How its steps are computed; none in old checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    /// The GEMM algorithms that a GPU used; none on a CPU.
    #[serde(default, rename = "products")]
    pub matmul_algorithms: Option<MatmulAlgorithms>,
    /// The processor's units that multiplied bf16 matrices; none in fp32, on a GPU, and in old checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16_units: Option<String>,
    /// The head of the run's ledger at this checkpoint; none in old checkpoints.
    #[serde(default)]
    pub ledger: Option<LedgerHead>,
}

/// How an optimizer step is computed. Each split rounds differently: resuming is bit-exact only with the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execution {
    /// Sequences of a micro-batch, of the largest stage.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step, of the largest stage.
    pub gradient_accumulation_steps: usize,
    /// What the backward pass recomputes.
    pub activation_recompute: ActivationRecompute,
    /// Virtual shards whose gradients are summed as a tree (`runtime.deterministic_reduction`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deterministic_reduction: Option<usize>,
    /// The micro-batches of each stage; empty without stages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageExecution>,
}

/// How an optimizer step of a stage is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageExecution {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step.
    pub gradient_accumulation_steps: usize,
}

impl Execution {
    /// Sequences of an optimizer step.
    pub fn sequences_per_step(&self) -> usize {
        self.micro_batch * self.gradient_accumulation_steps
    }
}

/// The GEMM algorithm and kernel variants that a GPU chose by timing them. Each rounds differently: resuming is
/// bit-exact only with the same choices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulAlgorithms {
    /// The GPU and the libraries that the choices are for.
    pub fingerprint: String,
    /// The algorithm or variant chosen for each operation and shape.
    pub choices: BTreeMap<String, String>,
}

/// The lowest held-out loss so far and its step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestEvaluation {
    /// The step it was measured at.
    pub step: u64,
    /// Mean nats per token.
    pub loss: f64,
}

/// The last improvement of the held-out loss: later losses must fall below it by `runtime.evaluation.min_delta`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Improvement {
    /// The step it was measured at.
    pub step: u64,
    /// Mean nats per token.
    pub loss: f64,
    /// Evaluations since then.
    pub evaluations_since: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(stage: &u64) -> bool {
    *stage == 0
}

impl TrainerState {
    /// The precision that the run's model is used in: the one it trains in, or BF16 where its GEMMs are in fp8.
    pub(super) fn precision(&self) -> Option<Precision> {
        let trained_in = serde_json::from_value(self.fingerprint.get(config_fingerprint::PRECISION)?.clone()).ok()?;
        Some(if trained_in == Precision::Fp8 { Precision::Bf16 } else { trained_in })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        pretty(self)
    }

    pub(super) fn from_bytes(directory: &Path, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let unreadable =
            |error: serde_json::Error| CheckpointError::corrupted(directory, format!("trainer_state.json: {error}"));
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
