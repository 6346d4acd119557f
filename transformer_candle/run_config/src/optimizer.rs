//! `optimizer`: the update rule and its settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The update rule and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub algorithm: Algorithm,
    /// Peak learning rate, reached at the end of the warm-up. Larger models need a smaller one: 1e-3
    /// for 10 M parameters, 3e-4 for 1 B.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub learning_rate: f64,
    /// Decoupled weight decay per step, multiplied by the learning rate. It applies to the projections
    /// and an untied head, not to norms and embeddings.
    #[schemars(range(min = 0, max = 1))]
    pub weight_decay: f64,
    /// Decay of the first moment, the running mean of the gradient.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub beta1: f64,
    /// Decay of the second moment, the running mean of the squared gradient. 0.95 recovers faster from
    /// loss spikes than 0.999.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub beta2: f64,
    /// Added to the denominator of the update.
    #[schemars(range(max = 0.1), extend("exclusiveMinimum" = 0))]
    pub epsilon: f64,
    /// Gradients with a larger global norm are scaled down to this one. `null`: no clipping.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub max_grad_norm: Option<f64>,
    /// Coefficient of the z-loss, the squared log-sum-exp of each token's logits (`PaLM`, Chowdhery et al.,
    /// 2022): it keeps logits from drifting, which bf16 would round coarsely. 1e-4 is usual; 0 is none. The
    /// reported loss stays the cross-entropy.
    #[schemars(range(min = 0, max = 1))]
    pub z_loss: f64,
    /// Multiplies the learning rate of the token embedding, whose rows have gradients only in steps with their
    /// token. With 10 a model of 10 M parameters with an untied head needed 183 steps of Muon instead of 244. A tied
    /// head is the embedding.
    #[schemars(range(max = 1000), extend("exclusiveMinimum" = 0))]
    pub embedding_learning_rate_scale: f64,
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
            z_loss: 0.0,
            embedding_learning_rate_scale: 1.0,
            muon: MuonConfig::default(),
        }
    }
}

/// Update rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    AdamW,
    /// Muon (Jordan et al., 2024) for the projections of the decoder blocks, `AdamW` for embedding, head and norms. Its
    /// updates are scaled to the size of `AdamW`'s (Liu et al., 2025), so that learning rate and weight decay serve
    /// both.
    Muon,
}

/// Settings of Muon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MuonConfig {
    /// Decay of the momentum, the running mean of the gradient; Nesterov momentum is used.
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
