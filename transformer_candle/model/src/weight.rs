//! A parameter in memory, as layers hold it.

use kernels::Buffer;

/// A parameter in memory: its values and, where it trains, their gradient.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The values, F32 or BF16.
    pub values: Buffer,
    /// The gradient, F32; None where nothing trains, or not this parameter.
    pub gradient: Option<Buffer>,
}

impl Weight {
    /// The values, and the gradient to be written, if the parameter trains.
    pub(crate) fn with_gradient(&mut self) -> (&Buffer, Option<&mut Buffer>) {
        (&self.values, self.gradient.as_mut())
    }
}
