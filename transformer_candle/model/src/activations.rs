//! Which of the forward pass's values each block keeps, and which blocks share.
//!
//! With `activation_recompute: none` every block keeps its own of everything that its backward pass reads. `selective`
//! keeps neither the norms' outputs (normed query and key heads included) nor the `SwiGLU`: they are recomputed into
//! buffers that all blocks share. `block` keeps a block's input only, and recomputes the rest of the block into one shared
//! set. Without training all blocks share all.

use std::collections::BTreeMap;

use kernels::memory::{BufferId, Category, Plan};
use kernels::{DType, DeviceKind};

use crate::ActivationRecompute;

/// What decides the size of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationSettings {
    /// Sequences of a pass, B.
    pub batch: usize,
    /// Positions of each, T.
    pub sequence_length: usize,
    /// Element type of activations and weights.
    pub dtype: DType,
    /// What is recomputed instead of kept.
    pub recompute: ActivationRecompute,
    /// Whether there is a backward pass at all.
    pub training: bool,
    /// Positions that the rotary embedding knows: T, or the whole context that a cache holds.
    pub positions: usize,
    /// Which kind of device it runs on.
    pub device: DeviceKind,
    /// Elements of workspace that the caller's own operations need.
    pub workspace_elements: usize,
}

/// Under which policies a block that trains keeps its own buffer of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// Under every one: what the block is recomputed from.
    BlockInput,
    /// Unless whole blocks are recomputed.
    Inner,
    /// Only where nothing is recomputed.
    Recomputable,
}

/// Plans the buffers of one block after the other.
pub(crate) struct BlockPlanner<'a> {
    pub(crate) settings: &'a ActivationSettings,
    layer: usize,
    /// What blocks share, by name.
    shared: BTreeMap<&'static str, BufferId>,
    plan: &'a mut Plan,
}

impl<'a> BlockPlanner<'a> {
    /// Begins with the first block.
    pub(crate) fn new(settings: &'a ActivationSettings, plan: &'a mut Plan) -> Self {
        Self { settings, layer: 0, shared: BTreeMap::new(), plan }
    }

    /// Goes to the next block.
    pub(crate) fn next_block(&mut self) {
        self.layer += 1;
    }

    /// A buffer of this block, or the one that all blocks share.
    pub(crate) fn add(&mut self, name: &'static str, saved: Saved, dtype: DType, shape: &[usize]) -> BufferId {
        if self.keeps(saved) {
            let name = format!("layers.{}.{name}", self.layer);
            return self.plan.add(name, Category::SavedActivations, dtype, shape);
        }
        let add = || self.plan.add(format!("layers.{name}"), Category::Scratch, dtype, shape);
        *self.shared.entry(name).or_insert_with(add)
    }

    /// The output of a norm. Recomputed outputs are needed one after the other: one buffer serves both of a block.
    pub(crate) fn add_normed(&mut self, name: &'static str, shape: &[usize]) -> BufferId {
        let name = if self.keeps(Saved::Recomputable) { name } else { "normed" };
        self.add(name, Saved::Recomputable, self.settings.dtype, shape)
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
