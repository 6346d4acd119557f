//! Random arguments of the cases.

use super::bounds::{BF16, F32};
use super::{BufferContents, Random};
use crate::DType;

/// Draws the arguments of the cases of one element type.
pub struct Inputs {
    /// Where they are drawn from.
    pub random: Random,
    /// The element type of activations and weights: F32 or BF16.
    pub dtype: DType,
}

impl Inputs {
    /// Draws activations or weights.
    pub fn numbers(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), self.dtype)
    }

    /// Draws F32 values, whatever the type of activations.
    pub fn f32(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), DType::F32)
    }

    /// Draws token ids below `limit`, with many repetitions.
    pub fn ids(&mut self, count: usize, limit: usize) -> BufferContents {
        let few = (count / 3).clamp(1, limit);
        let spread = limit / few;
        let bits = (0..count).map(|_| (self.random.below(few) * spread) as u32).collect();
        BufferContents { dtype: DType::U32, bits }
    }

    /// Returns the name of a case: operation and type, such as `swiglu::forward bf16`.
    pub fn name(&self, operation: &str) -> String {
        format!("{operation} {}", if self.dtype == DType::BF16 { "bf16" } else { "f32" })
    }

    /// Returns the tolerance of results in the activations' type.
    pub fn bound(&self) -> f64 {
        if self.dtype == DType::BF16 { BF16 } else { F32 }
    }
}
