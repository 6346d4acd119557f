//! What an operation asks of a card, in the terms of the kernels' manifest.

use candle_core::DType;

use crate::Buffer;

/// An argument of a launch, in the order of the kernel's signature. The launcher compares each with the manifest: its type, and
/// the multiple of 16 (bytes of an address, units of a number) that the kernel was compiled to rely on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// The first element of a buffer.
    Pointer {
        /// On the card.
        address: usize,
        /// What the kernel will find there.
        dtype: DType,
    },
    I32(i32),
    F32(f32),
}

impl From<&Buffer> for Value {
    fn from(buffer: &Buffer) -> Self {
        Self::Pointer { address: buffer.address(), dtype: buffer.dtype() }
    }
}

impl From<&mut Buffer> for Value {
    fn from(buffer: &mut Buffer) -> Self {
        Self::from(&*buffer)
    }
}

impl Value {
    /// Part of a buffer of another type, such as integers in an F32 workspace: from its element `offset` on.
    pub(crate) fn reinterpreted(buffer: &Buffer, offset: usize, dtype: DType) -> Self {
        let address = buffer.address() + offset * buffer.dtype().size_in_bytes();
        Self::Pointer { address, dtype }
    }
}
