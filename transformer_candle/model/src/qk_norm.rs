//! The norms of query and key heads between their projection and the rotary embedding, forward beside backward.

use kernels::{Buffer, qk_norm};

use crate::Result;
use crate::pass::PassSettings;
use crate::weight::Weight;

/// A norm of each query head and one of each key head.
#[derive(Clone, Debug)]
pub(crate) struct QkNorm {
    /// Weights of the query heads' norm, then of the key heads'.
    weight_2E: Weight,
    /// Output of the projections: queries, keys and values.
    pub projected_NP: Buffer,
}

impl QkNorm {
    /// The norms of the heads that the projections write to `projected_NP`.
    pub(crate) fn new(weight_2E: Weight, projected_NP: Buffer) -> Self {
        Self { weight_2E, projected_NP }
    }

    /// Writes the normed heads, and copies values.
    pub(crate) fn forward(&self, qkv_NP: &mut Buffer, settings: &PassSettings) -> Result<()> {
        let (weight_2E, heads) = (&self.weight_2E.values, &settings.attention.heads);
        Ok(qk_norm::forward(&self.projected_NP, weight_2E, settings.epsilon, heads, qkv_NP)?)
    }

    /// Turns the gradient of the normed heads into that of the projections, and adds to the weights' gradient.
    pub(crate) fn backward(
        &mut self,
        dqkv_NP: &mut Buffer,
        settings: &PassSettings,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let (projected_NP, heads) = (&self.projected_NP, &settings.attention.heads);
        let (weight_2E, dweight_2E) = self.weight_2E.with_gradient();
        let epsilon = settings.epsilon;
        Ok(qk_norm::backward(projected_NP, weight_2E, epsilon, heads, dqkv_NP, dweight_2E, workspace)?)
    }
}
