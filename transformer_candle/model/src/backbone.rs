//! The decoder without its head: embedding, blocks and last norm; forward beside backward. Training and generation both
//! run it.

mod plan;

use kernels::{Buffer, WriteMode, embedding, timing};

pub use plan::BackbonePlan;

use crate::block::Block;
use crate::lora::DropoutKey;
use crate::norm::Norm;
use crate::pass::{Pass, PassSettings, Scratch};
use crate::weight::Weight;
use crate::{ActivationRecompute, Result};

/// Embedding, blocks and last norm over planned buffers.
#[derive(Debug)]
pub struct Backbone {
    /// Token embedding, [V, D].
    pub embed_tokens: Weight,
    /// The decoder blocks, at least one; what they share is the same memory in each.
    pub blocks: Vec<Block>,
    /// The norm whose output the head reads.
    pub final_norm: Norm,
    /// The settings that every pass has in common.
    pub settings: PassSettings,
    /// The key of adapters' dropout, to be written before a pass; None without dropout.
    pub dropout_key: Option<DropoutKey>,
    /// Buffers that every layer overwrites.
    pub scratch: Scratch,
}

impl Backbone {
    /// Runs the tokens `ids_N` through the blocks and leaves the head's input in [`Backbone::hidden_ND`]. `documents_N`
    /// and `past` are those of [`Pass`].
    pub fn forward(&mut self, ids_N: &Buffer, documents_N: Option<&Buffer>, past: usize) -> Result<()> {
        let Self { embed_tokens, blocks, final_norm, settings, scratch, .. } = self;
        let write_mode = WriteMode::Accumulate;
        let mut pass = Pass { settings, documents_N, past, write_mode, scratch };
        embedding::forward(&embed_tokens.values, ids_N, blocks[0].attention.residual_mut())?;
        for (layer, block) in blocks.iter_mut().enumerate() {
            timing::scope_of("layer", layer, || block.forward(&mut pass))?;
        }
        final_norm.forward(&pass)
    }

    /// Begins the backward pass of the last [`Backbone::forward`] with the gradient of [`Backbone::hidden_ND`], which
    /// is in `dnormed_ND`. [`Backbone::backward_block`] of each block, from the last to the first, and
    /// [`Backbone::backward_embedding`] follow.
    pub fn backward_final_norm(&mut self) -> Result<()> {
        let (gradients, workspace) = self.scratch.backward()?;
        gradients.dresidual_ND.zero()?;
        self.final_norm.backward(gradients, workspace)
    }

    /// Computes the gradients of the parameters of a block.
    pub fn backward_block(&mut self, layer: usize, documents_N: Option<&Buffer>, write_mode: WriteMode) -> Result<()> {
        let Self { blocks, settings, scratch, .. } = self;
        // The last block's values are still there from the forward pass.
        let is_recomputed = settings.recompute == ActivationRecompute::Block && layer + 1 < blocks.len();
        let (block, mut pass) = (&mut blocks[layer], Pass { settings, documents_N, past: 0, write_mode, scratch });
        timing::scope_of("layer", layer, || {
            if is_recomputed {
                block.recompute(&mut pass)?;
            }
            block.backward(&mut pass)
        })
    }

    /// Ends the backward pass with the gradient of the embedding, where that trains.
    pub fn backward_embedding(&mut self, ids_N: &Buffer) -> Result<()> {
        let (gradients, workspace) = self.scratch.backward()?;
        match &mut self.embed_tokens.gradient {
            Some(dtable_VD) => Ok(embedding::backward(ids_N, &gradients.dresidual_ND, dtable_VD, workspace)?),
            None => Ok(()),
        }
    }

    /// The normed output of the last block, [N, D].
    pub fn hidden_ND(&self) -> &Buffer {
        &self.final_norm.values.normed_ND
    }
}
