//! Settings of the update rules, and the numbers that change from step to step.

/// Length of the F32 buffer with the numbers that change from step to step; the constants below index it.
pub const SCALARS: usize = 5;
/// The step's learning rate.
pub const LEARNING_RATE: usize = 0;
/// 1 - beta1^t.
pub const BIAS_CORRECTION1: usize = 1;
/// 1 - beta2^t.
pub const BIAS_CORRECTION2: usize = 2;
/// The factor of the gradients; written by [`crate::grad_norm::clip`].
pub const CLIP_SCALE: usize = 3;
/// Whether the step is applied: 0 leaves everything as it is; written by [`crate::grad_norm::clip`].
pub const APPLY: usize = 4;

/// Settings of [`crate::adamw`], the same for a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
}

/// Iterations of [`crate::muon::orthogonalize`].
pub const ITERATIONS: usize = 5;

/// Settings of [`crate::muon`], the same for a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// The polynomials of [`crate::muon::orthogonalize`].
    pub polynomials: Polynomials,
}

/// Coefficients [a, b, c] of each iteration's polynomial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polynomials {
    /// One quintic polynomial five times, as `torch.optim.Muon`: singular values end between 0.68 and 1.13.
    Quintic,
    /// Minimax quintics ("Polar Express", Amsel et al., arXiv:2505.16932): each has the least greatest distance to one
    /// on the interval that the one before leaves of [1e-3, 1]. Singular values end between 0.86 and 1.14.
    PolarExpress,
}

impl Polynomials {
    /// The coefficients [a, b, c] of every iteration.
    pub fn coefficients(self) -> [[f32; 3]; ITERATIONS] {
        match self {
            Self::Quintic => [[3.4445, -4.7750, 2.0315]; ITERATIONS],
            // By Remez's algorithm. The argument of all but the last is divided by 1.02, as bf16 may leave singular
            // values above one, where a minimax polynomial grows steeply.
            Self::PolarExpress => [
                [8.304_244, -23.659_9, 16.873_11],
                [4.102_223_4, -2.930_337_2, 0.525_976_3],
                [3.894_606, -2.790_746_7, 0.510_678_9],
                [3.262_496_2, -2.351_505, 0.462_679_86],
                [2.325_043_7, -1.690_704_6, 0.421_166_36],
            ],
        }
    }
}
