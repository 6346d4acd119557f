//! A parameter in memory, as layers hold it.

use kernels::Buffer;
use kernels::fp8::{Codes, ScaleBlock};

/// A parameter in memory: its values and, where it trains, their gradient.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The values, F32 or BF16; or the e4m3 codes of a frozen matrix, U8.
    pub values: Buffer,
    /// Where the values are codes, their scales and what shares one.
    pub scales: Option<(ScaleBlock, Buffer)>,
    /// The gradient, F32; None where nothing trains, or not this parameter.
    pub gradient: Option<Buffer>,
}

impl Weight {
    /// A parameter that does not train, in fp8.
    pub(crate) fn in_fp8(block: ScaleBlock, codes: &Codes) -> Self {
        let Codes { values, scales } = codes.clone();
        Self { values, scales: Some((block, scales)), gradient: None }
    }

    /// The codes of a matrix that is held in fp8, and what shares a scale.
    pub(crate) fn codes(&self) -> Option<(ScaleBlock, Codes)> {
        let (block, scales) = self.scales.clone()?;
        Some((block, Codes { values: self.values.clone(), scales }))
    }

    /// The values, and the gradient to be written, if the parameter trains.
    pub(crate) fn with_gradient(&mut self) -> (&Buffer, Option<&mut Buffer>) {
        (&self.values, self.gradient.as_mut())
    }
}
