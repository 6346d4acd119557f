//! Random arguments of the cases.

use kernels::DType;

use super::bounds::{BF16, F32};
use crate::device_under_test::{BufferContents, Random};

/// Generates random arguments of the cases of one element type.
pub(super) struct InputGenerator {
    pub(super) random: Random,
    /// Element type of activations and weights.
    pub(super) dtype: DType,
}

impl InputGenerator {
    /// Draws activations or weights.
    pub(super) fn numbers(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), self.dtype)
    }

    /// Draws F32 values, whatever the type of activations.
    pub(super) fn f32(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), DType::F32)
    }

    /// Draws token ids below `limit`, with many repetitions.
    pub(super) fn ids(&mut self, count: usize, limit: usize) -> BufferContents {
        let few = (count / 3).clamp(1, limit);
        let spread = limit / few;
        BufferContents {
            dtype: DType::U32,
            bits: (0..count).map(|_| (self.random.below(few) * spread) as u32).collect(),
        }
    }

    /// Returns the name of a case: operation and type, such as `swiglu::forward bf16`.
    pub(super) fn name(&self, operation: &str) -> String {
        format!("{operation} {}", if self.dtype == DType::BF16 { "bf16" } else { "f32" })
    }

    /// Returns the tolerance of results in the activations' type.
    pub(super) fn bound(&self) -> f64 {
        if self.dtype == DType::BF16 { BF16 } else { F32 }
    }
}
