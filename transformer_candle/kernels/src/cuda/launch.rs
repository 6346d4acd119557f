//! What an operation asks of a GPU, in the terms of the kernels' manifest.

use candle_core::DType;

use crate::Buffer;

/// An argument of a launch, in the order of the kernel's signature. The launcher compares each with the manifest: its type, and
/// the multiple of 16 (bytes of an address, units of a number) that the kernel was compiled to rely on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// The first element of a buffer.
    Pointer {
        /// On the GPU.
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

    /// The same place, so many elements further on.
    pub(crate) fn skip_elements(self, offset: usize) -> Self {
        match self {
            Self::Pointer { address, dtype } => {
                Self::Pointer { address: address + offset * dtype.size_in_bytes(), dtype }
            }
            Self::I32(_) | Self::F32(_) => self,
        }
    }

    /// A number of things. Kernels count in 32 bits; more make a grid that no launch can have.
    pub(crate) fn count(things: usize) -> Self {
        Self::I32(i32::try_from(things).unwrap_or(i32::MAX))
    }

    /// What a pointer points to.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Pointer { dtype, .. } => dtype,
            Self::I32(_) => DType::I32,
            Self::F32(_) => DType::F32,
        }
    }
}
