//! Which of the forward pass's values each block keeps, and which blocks share.
//!
//! With `activation_recompute: none` every block keeps its own of everything that its backward pass reads. `selective`
//! keeps neither the norms' outputs (normed query and key heads included) nor the `SwiGLU`: they are recomputed into
//! buffers that all blocks share. `block` keeps a block's input only, and recomputes the rest of the block into one
//! shared set. Without training all blocks share all.

use std::collections::BTreeMap;

use kernels::fp8::{Codes, ScaleBlock};
use kernels::memory::{Arena, Category};
use kernels::{Buffer, DType, DeviceKind};

use crate::ActivationRecompute;
use crate::weights::take_codes;

/// The settings that decide the size of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationSettings {
    /// Sequences of a pass, B.
    pub batch: usize,
    /// Positions of each, T.
    pub sequence_length: usize,
    /// Element type of activations and weights.
    pub dtype: DType,
    /// Element type of the residual stream and of what is added to it: `dtype`, or F32 on a CPU where there is no
    /// backward pass.
    pub residual_dtype: DType,
    /// Which activations the backward pass recomputes instead of keeping them.
    pub recompute: ActivationRecompute,
    /// Whether there is a backward pass at all.
    pub training: bool,
    /// The elements that share a scale where the operands of the blocks' GEMMs are rounded to fp8; None where they are
    /// not.
    pub fp8: Option<ScaleBlock>,
    /// The kind of device that the model runs on.
    pub device: DeviceKind,
    /// Elements of workspace that the caller's own operations need.
    pub workspace_elements: usize,
}

/// Under which policies a block that trains keeps its own buffer of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// Under every policy: the block is recomputed from it.
    BlockInput,
    /// Unless whole blocks are recomputed.
    Inner,
    /// Only where nothing is recomputed.
    Recomputable,
}

/// Takes the buffers of one block after the other.
pub(crate) struct BlockBuffers<'a> {
    pub(crate) settings: &'a ActivationSettings,
    layer: usize,
    /// The buffers that blocks share, by name.
    shared: BTreeMap<&'static str, Buffer>,
    arena: &'a mut Arena,
}

impl<'a> BlockBuffers<'a> {
    /// Begins with the first block.
    pub(crate) fn new(settings: &'a ActivationSettings, arena: &'a mut Arena) -> Self {
        Self { settings, layer: 0, shared: BTreeMap::new(), arena }
    }

    /// Goes to the next block.
    pub(crate) fn next_block(&mut self) {
        self.layer += 1;
    }

    /// Takes a buffer of this block, or the one that all blocks share.
    pub(crate) fn take(&mut self, name: &'static str, saved: Saved, dtype: DType, shape: &[usize]) -> Buffer {
        if self.keeps(saved) {
            let name = format!("layers.{}.{name}", self.layer);
            return self.arena.take(name, Category::SavedActivations, dtype, shape);
        }
        self.take_shared(name, dtype, shape)
    }

    /// Takes the buffer of this name that all blocks share.
    pub(crate) fn take_shared(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> Buffer {
        let take = || self.arena.take(format!("layers.{name}"), Category::Scratch, dtype, shape);
        self.shared.entry(name).or_insert_with(take).clone()
    }

    /// Takes the fp8 codes of a matrix of this block's weights.
    pub(crate) fn take_fp8_weight(&mut self, name: &str, block: ScaleBlock, sizes: [usize; 2]) -> Codes {
        take_codes(&format!("layers.{}.{name}", self.layer), block, sizes, self.arena)
    }

    /// Takes the output of a norm. Recomputed outputs are needed one after the other: one buffer serves both of a block.
    pub(crate) fn take_normed(&mut self, name: &'static str, shape: &[usize]) -> Buffer {
        let name = if self.keeps(Saved::Recomputable) { name } else { "normed" };
        self.take(name, Saved::Recomputable, self.settings.dtype, shape)
    }

    fn keeps(&self, saved: Saved) -> bool {
        let recompute = self.settings.recompute;
        self.settings.training
            && match saved {
                Saved::BlockInput => true,
                Saved::Inner => recompute != ActivationRecompute::Block,
                Saved::Recomputable => recompute == ActivationRecompute::None,
            }
    }
}
