//! The tensors that an optimizer keeps from step to step: what a checkpoint saves beside the weights.

use std::ops::Range;

use kernels::{
    Buffer, DType,
    memory::{Arena, Category},
};

use crate::engine::shard::Shard;

/// The low 16 bits of the f32 master weights whose high bits are the bf16 weights.
pub(super) const MASTER_LOW_BITS: &str = "master_remainder";

/// A tensor of the optimizer's state before it is allocated: one element for each parameter of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// The suffix of a parameter's name in `optimizer.safetensors`, such as `first_moment`.
    pub name: &'static str,
    /// Its category in the memory plan.
    pub category: Category,
    /// The element type.
    pub dtype: DType,
    /// The ranges of the flat weights that this rank keeps state of, an element for each.
    pub shard: Shard,
    /// The range of the flat weights that all ranks together keep state of.
    pub of_all_ranks: Range<usize>,
}

impl StateLayout {
    /// The layout of a tensor that one rank keeps whole.
    pub fn new(name: &'static str, category: Category, dtype: DType, range: Range<usize>) -> Self {
        Self { name, category, dtype, shard: Shard::whole(range.clone()), of_all_ranks: range }
    }

    /// Whether some rank has the state of a parameter with these elements of the flat weights.
    pub fn is_kept(&self, elements: &Range<usize>) -> bool {
        self.of_all_ranks.start <= elements.start && elements.end <= self.of_all_ranks.end
    }

    /// Returns the offset in this tensor of the state of a parameter with these elements of the flat weights; none
    /// where the tensor does not hold it.
    pub fn offset_of(&self, elements: &Range<usize>) -> Option<usize> {
        self.shard.position_of(elements)
    }

    pub(super) fn take(self, arena: &mut Arena) -> StateTensor {
        let buffer = arena.take(self.name, self.category, self.dtype, &[self.shard.len()]);
        StateTensor { layout: self, buffer }
    }
}

/// A tensor of the optimizer's state.
#[derive(Debug)]
pub struct StateTensor {
    /// Its name, element type and shard.
    pub layout: StateLayout,
    /// Its elements.
    pub buffer: Buffer,
}

impl StateTensor {
    pub(super) fn is_low_bits(&self) -> bool {
        self.layout.name == MASTER_LOW_BITS
    }

    /// Returns a view of the state of the flat weights from `start` on, in this shape.
    ///
    /// # Panics
    /// If the tensor lacks one of them.
    pub(super) fn view(&self, start: usize, shape: &[usize]) -> kernels::Result<Buffer> {
        let position = self.layout.offset_of(&(start..start + shape.iter().product::<usize>()));
        self.buffer.view(position.expect("the state of a rule covers what it updates"), shape)
    }
}
