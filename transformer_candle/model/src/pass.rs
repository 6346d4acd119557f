//! The settings and buffers that all layers of one pass through the decoder share.

use kernels::attention::AttentionShape;
use kernels::rope::RopeTables;
use kernels::{Buffer, WriteMode};

use crate::{ActivationRecompute, Error, Result};

/// The settings that stay the same from pass to pass.
#[derive(Clone, Debug)]
pub struct PassSettings {
    /// The sizes of attention: heads and sequences.
    pub attention: AttentionShape,
    /// Added to the mean square inside of each norm.
    pub epsilon: f32,
    /// Cosines and sines of the rotary embedding.
    pub rope: RopeTables,
    /// Which activations the backward pass recomputes.
    pub recompute: ActivationRecompute,
}

/// Buffers that every layer overwrites.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// The output of the last attention or MLP, which the next norm adds to the residual stream.
    pub layer_output_ND: Buffer,
    /// F32 workspace of every operation.
    pub workspace: Buffer,
    /// The buffers of the backward pass; None without training.
    pub gradients: Option<GradientScratch>,
}

/// The gradients of a backward pass. Each is needed only until the next is computed, so several share memory.
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
    /// Returns the buffers of a backward pass and the workspace.
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
    /// The settings that every pass has in common.
    pub settings: &'a PassSettings,
    /// The start of each token's document in its sequence; None where sequences are not divided (see
    /// [`kernels::attention`]).
    pub documents_N: Option<&'a Buffer>,
    /// Tokens before this pass, whose keys and values are cached.
    pub past: usize,
    /// Whether the backward pass overwrites or accumulates the gradients of matrices; those of norms, biases and the
    /// embedding are always accumulated.
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
