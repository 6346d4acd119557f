//! Kernel arguments, in the types of the manifest.

use candle_core::DType;

/// An argument of a launch. The launcher compares each with the manifest: its type, and whether it is a multiple of 16
/// (bytes of an address, units of an integer) as the kernel was compiled to assume.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KernelArg {
    /// The first element of a buffer.
    Pointer {
        /// The element's address on the GPU.
        address: usize,
        /// The element type.
        dtype: DType,
    },
    I32(i32),
    F32(f32),
}

impl KernelArg {
    /// The pointer `offset` elements further on.
    pub(crate) fn skip_elements(self, offset: usize) -> Self {
        match self {
            Self::Pointer { address, dtype } => {
                Self::Pointer { address: address + offset * dtype.size_in_bytes(), dtype }
            }
            Self::I32(_) | Self::F32(_) => self,
        }
    }

    /// A count as a 32-bit integer, as kernels use; a larger count gives a grid that cannot be launched.
    pub(crate) fn count(things: usize) -> Self {
        Self::I32(i32::try_from(things).unwrap_or(i32::MAX))
    }

    /// The element type of a pointer, or the type of a number.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Pointer { dtype, .. } => dtype,
            Self::I32(_) => DType::I32,
            Self::F32(_) => DType::F32,
        }
    }
}
