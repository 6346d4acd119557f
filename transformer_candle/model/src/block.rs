//! One decoder block: pre-norm attention and a pre-norm MLP, forward beside backward.
//!
//! The norms add up the residual stream: attention and MLP leave their output in `layer_output_ND`, and the next norm,
//! in this block, in the next or behind the last one, adds it and norms the sum in one pass.

use kernels::{Buffer, timing};

use crate::activations::BlockBuffers;
use crate::attention::{Attention, KeyValueCache};
use crate::lora::MakeAdapters;
use crate::mlp::Mlp;
use crate::parameters::BlockParameters;
use crate::pass::Pass;
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// Attention, then the MLP.
#[derive(Clone, Debug)]
pub struct Block {
    /// The first half.
    pub attention: Attention,
    /// The second half.
    pub mlp: Mlp,
}

impl Block {
    /// A block; `previous_ND` is the residual stream that the last norm of the block before it wrote, None for the
    /// first block.
    pub(crate) fn new(
        shape: &ModelShape,
        weights: &BlockParameters<Weight>,
        previous_ND: Option<Buffer>,
        adapters: MakeAdapters<'_>,
        cache: Option<KeyValueCache>,
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Self> {
        let attention = Attention::new(shape, weights, previous_ND, adapters, cache, buffers)?;
        let mlp = Mlp::new(shape, weights, attention.residual_ND().clone(), adapters, buffers)?;
        Ok(Self { attention, mlp })
    }

    /// Runs the block; its output stays in two parts, [`Mlp::residual_ND`] and `layer_output_ND`.
    pub fn forward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        timing::scope("attention", || self.attention.forward(pass))?;
        timing::scope("mlp", || self.mlp.forward(pass))
    }

    /// Computes again what the forward pass left in buffers that other blocks have used since: all but the block's
    /// input, its first norm's statistics, and what [`Block::backward`] itself recomputes.
    pub fn recompute(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        timing::scope("attention recompute", || self.attention.recompute(pass))?;
        timing::scope("mlp recompute", || self.mlp.recompute(pass))
    }

    /// Turns `dresidual_ND` from the gradient of the block's output into that of its input, and computes the gradients
    /// of the parameters. Values that are not needed any more are overwritten.
    pub fn backward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        timing::scope("mlp backward", || self.mlp.backward(pass))?;
        timing::scope("attention backward", || self.attention.backward(pass))
    }
}
