//! The bounds of operations, on ‖ours - exact‖ / ‖exact‖. They follow from where an operation rounds.

/// Copies and other operations without rounding.
pub(super) const EXACT: f64 = 0.0;
/// F32 throughout: sums of thousands of terms in another order, exponentials of another library. 200 ULP.
pub(super) const F32: f64 = 2e-5;
/// F32 element by element, without sums: a division and a square root, each off by a few ULP.
pub(super) const F32_POINTWISE: f64 = 1e-6;
/// F32 sums of exact products of BF16 numbers. Tensor cores truncate where others round: 2e-5 for sums of 8192, times
/// five.
pub(super) const F32_SUM: f64 = 1e-4;
/// A result rounded once to BF16 is off by 2^-8 at most and by 1.7e-3 in the mean; two roundings in a row by 2.4e-3.
pub(super) const BF16: f64 = 4e-3;
/// BF16 attention rounds probabilities and their gradients as well, each a factor in a sum.
pub(super) const BF16_ATTENTION: f64 = 6e-3;
