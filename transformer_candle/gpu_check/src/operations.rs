//! Every operation of crate `kernels` against its CPU version in F32: forward and backward, F32 and BF16, at odd sizes
//! and those of real models.
//!
//! The bounds, on ‖ours - exact‖ / ‖exact‖, follow from where an operation rounds:

mod attention;
mod matmuls;
mod muon;
mod optimizer;
mod rows;

use kernels::DType;

use super::case::Case;
use super::device_under_test::{BufferContents, Random};
use super::part::Size;
use training::Result;

/// Copies and other operations without rounding.
const EXACT: f64 = 0.0;
/// F32 throughout: sums of thousands of terms in another order, exponentials of another library. 200 ULP.
const F32: f64 = 2e-5;
/// F32 element by element, without sums: a division and a square root, each off by a few ULP.
const F32_POINTWISE: f64 = 1e-6;
/// F32 sums of exact products of BF16 numbers. Tensor cores truncate where others round: 2e-5 for sums of 8192, times
/// five.
const F32_SUM: f64 = 1e-4;
/// A result rounded once to BF16 is off by 2^-8 at most and by 1.7e-3 in the mean; two roundings in a row by 2.4e-3.
const BF16: f64 = 4e-3;
/// BF16 attention rounds probabilities and their gradients as well, each a factor in a sum.
const BF16_ATTENTION: f64 = 6e-3;

/// Makes every case, one at a time, since the largest take gigabytes.
pub(super) fn visit(size: Size, seed: u64, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let mut inputs = InputGenerator { random: Random::new(seed ^ dtype.size_in_bytes() as u64), dtype };
        rows::visit(size, &mut inputs, visit)?;
        attention::visit(size, &mut inputs, visit)?;
        matmuls::visit(size, &mut inputs, visit)?;
        optimizer::visit(size, &mut inputs, visit)?;
        muon::visit(size, &mut inputs, visit)?;
    }
    Ok(())
}

/// Random arguments of the cases of one element type.
struct InputGenerator {
    random: Random,
    /// Of activations and weights.
    dtype: DType,
}

impl InputGenerator {
    /// Activations or weights.
    fn numbers(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), self.dtype)
    }

    /// F32 values, whatever the type of activations.
    fn f32(&mut self, shape: &[usize]) -> BufferContents {
        BufferContents::from_numbers(self.random.numbers(shape.iter().product()), DType::F32)
    }

    /// Token ids with many repetitions.
    fn ids(&mut self, count: usize, limit: usize) -> BufferContents {
        let few = (count / 3).clamp(1, limit);
        let spread = limit / few;
        BufferContents {
            dtype: DType::U32,
            bits: (0..count).map(|_| (self.random.below(few) * spread) as u32).collect(),
        }
    }

    /// The operation and the type, such as `swiglu::forward bf16`.
    fn name(&self, operation: &str) -> String {
        format!("{operation} {}", if self.dtype == DType::BF16 { "bf16" } else { "f32" })
    }

    /// The tolerance of results in the activations' type.
    fn bound(&self) -> f64 {
        if self.dtype == DType::BF16 { BF16 } else { F32 }
    }
}
