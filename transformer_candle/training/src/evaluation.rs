//! Evaluation on held-out text: mean loss a token, perplexity, and bits a byte, which tokenizers cannot flatter.

use serde::{Deserialize, Serialize};

/// What one evaluation found. A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationReport {
    /// Optimizer steps taken before it.
    pub step: u64,
    /// Mean over the held-out target tokens, nats.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Nats of all targets over the bytes of their text, in bits.
    pub bits_per_byte: Option<f64>,
    /// Target tokens evaluated.
    pub tokens: u64,
}
