//! What all layers of one pass through the decoder share.

use kernels::attention::AttentionShape;
use kernels::rope::RopeTables;
use kernels::{Buffer, WriteMode};

use crate::{ActivationRecompute, Error, Result};

/// What stays the same from pass to pass.
#[derive(Clone, Debug)]
pub struct PassSettings {
    /// Heads and sequences.
    pub attention: AttentionShape,
    /// Added to the mean square inside of each norm.
    pub epsilon: f32,
    /// Angles of the rotary embedding.
    pub rope: RopeTables,
    /// What the backward pass recomputes.
    pub recompute: ActivationRecompute,
}

/// Buffers that every layer overwrites.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// The output of the last attention or MLP, which the next norm adds to the residual stream.
    pub layer_output_ND: Buffer,
    /// F32 workspace of every operation.
    pub workspace: Buffer,
    /// The backward pass's values, where there is one.
    pub gradients: Option<GradientScratch>,
}

/// The values of a backward pass. None is needed for longer than until the next is made, so several share memory.
#[derive(Clone, Debug)]
pub struct GradientScratch {
    /// Gradient of the residual stream; every layer adds to it.
    pub dresidual_ND: Buffer,
    /// Gradient of a norm's output. Shares memory with `dattended_NA` and with [`Scratch::layer_output_ND`].
    pub dnormed_ND: Buffer,
    /// Gradient of attention's output before its projection.
    pub dattended_NA: Buffer,
    /// Gradient of queries, keys and values.
    pub dqkv_NP: Buffer,
}

impl Scratch {
    /// The buffers of a backward pass and the workspace.
    ///
    /// # Errors
    /// [`Error::EvaluationOnly`] where no backward pass was planned.
    pub fn backward(&mut self) -> Result<(&mut GradientScratch, &mut Buffer)> {
        let gradients = self.gradients.as_mut().ok_or(Error::EvaluationOnly)?;
        Ok((gradients, &mut self.workspace))
    }
}

/// One pass through the layers, forward or backward.
#[derive(Debug)]
pub struct Pass<'a> {
    /// What it has in common with every other pass.
    pub settings: &'a PassSettings,
    /// Where each token's document begins in its sequence; none where sequences are not divided (see
    /// [`kernels::attention`]).
    pub documents_N: Option<&'a Buffer>,
    /// Tokens before this pass, whose keys and values are cached.
    pub past: usize,
    /// What the backward pass does with the gradients of matrices; those of norms and of the embedding are always added
    /// to.
    pub write_mode: WriteMode,
    /// Buffers that every layer overwrites.
    pub scratch: &'a mut Scratch,
}

impl Pass<'_> {
    /// Whether anything is recomputed that a layer would otherwise have kept.
    pub(crate) fn recomputes(&self) -> bool {
        self.settings.recompute != ActivationRecompute::None
    }
}
