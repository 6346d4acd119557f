//! `optimizer`: how gradients change the weights.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How gradients change the weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub algorithm: Algorithm,
    /// Peak learning rate, reached at the end of the warm-up. Larger models want less: 1e-3 suits
    /// 10 M parameters, 3e-4 suits 1 B.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub learning_rate: f64,
    /// Decoupled weight decay a step, multiplied by the learning rate. It acts on the matrices of
    /// the blocks and an untied head; norms and embeddings do not decay.
    #[schemars(range(min = 0, max = 1))]
    pub weight_decay: f64,
    /// How much of the gradient's running mean is kept each step.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub beta1: f64,
    /// How much of the running mean of the squared gradient is kept each step. 0.95 rather than
    /// 0.999 follows loss spikes faster.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub beta2: f64,
    /// Added to the denominator of the update so that it never divides by zero.
    #[schemars(range(max = 0.1), extend("exclusiveMinimum" = 0))]
    pub epsilon: f64,
    /// Gradients are scaled down to this global norm where they exceed it. `null`: no clipping.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub max_grad_norm: Option<f64>,
    /// Settings of `algorithm: muon`.
    pub muon: MuonConfig,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::AdamW,
            learning_rate: 3e-4,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            max_grad_norm: Some(1.0),
            muon: MuonConfig::default(),
        }
    }
}

/// The update rules there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    AdamW,
    /// Muon (Jordan et al., 2024) for the projections of the decoder blocks, `AdamW` for embedding, head and norms. Its updates
    /// are scaled to the size of `AdamW`'s (Liu et al., 2025), so that learning rate and weight decay serve both.
    Muon,
}

/// Settings of Muon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MuonConfig {
    /// How much of the gradient's running mean is kept per step. The update looks one step ahead (Nesterov).
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub momentum: f64,
    /// Polynomials of the five iterations that orthogonalise an update.
    pub polynomials: MuonPolynomials,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self { momentum: 0.95, polynomials: MuonPolynomials::Quintic }
    }
}

/// Polynomials of Muon's iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MuonPolynomials {
    /// One quintic, the same in every iteration, as in `torch.optim.Muon`.
    Quintic,
    /// The best quintic for each iteration (Amsel et al., 2025): updates come closer to orthogonal.
    PolarExpress,
}
