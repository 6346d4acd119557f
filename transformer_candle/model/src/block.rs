//! One decoder block: pre-norm attention and a pre-norm MLP, forward beside backward.
//!
//! The norms add up the residual stream: attention and MLP leave their output in `layer_output_ND`, and the next norm,
//! in this block, in the next or behind the last one, adds it and norms the sum in one pass.

use kernels::memory::BufferId;
use kernels::{Buffer, timing};

use crate::activations::BlockPlanner;
use crate::attention::{Attention, AttentionActivations, KeyValueCache};
use crate::lora::BindAdapters;
use crate::mlp::{Mlp, MlpActivations};
use crate::parameters::BlockParameters;
use crate::pass::Pass;
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// Activations of a block in the forward pass. `T` is a [`BufferId`] while planning and a [`Buffer`] afterwards.
#[derive(Clone, Debug)]
pub(crate) struct BlockActivations<T> {
    /// Activations of attention.
    pub attention: AttentionActivations<T>,
    /// Activations of the MLP.
    pub mlp: MlpActivations<T>,
}

impl BlockActivations<BufferId> {
    pub(crate) fn plan(shape: &ModelShape, planner: &mut BlockPlanner<'_>) -> Self {
        Self { attention: AttentionActivations::plan(shape, planner), mlp: MlpActivations::plan(shape, planner) }
    }
}

impl<T> BlockActivations<T> {
    /// Returns the same fields with each value replaced.
    pub(crate) fn try_map<U>(&self, of: &mut impl FnMut(&T) -> Result<U>) -> Result<BlockActivations<U>> {
        Ok(BlockActivations { attention: self.attention.try_map(of)?, mlp: self.mlp.try_map(of)? })
    }
}

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
        weights: &BlockParameters<Weight>,
        previous_ND: Option<Buffer>,
        values: BlockActivations<Buffer>,
        adapters: BindAdapters<'_>,
        cache: Option<KeyValueCache>,
    ) -> Result<Self> {
        let attention = Attention::new(weights, previous_ND, values.attention, adapters, cache)?;
        let mlp = Mlp::new(weights, attention.residual_ND().clone(), values.mlp, adapters)?;
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
