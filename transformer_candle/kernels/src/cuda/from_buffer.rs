//! Buffers as arguments of launches.

use candle_core::DType;

use super::matmul::WORKSPACE_ALIGNMENT;
use super::{KernelArg, Operand, Workspace};
use crate::Buffer;

impl From<&Buffer> for KernelArg {
    fn from(buffer: &Buffer) -> Self {
        Self::Pointer { address: buffer.address(), dtype: buffer.dtype() }
    }
}

impl From<&mut Buffer> for KernelArg {
    fn from(buffer: &mut Buffer) -> Self {
        Self::from(&*buffer)
    }
}

impl KernelArg {
    /// A pointer to element `offset` of a buffer, read as another type, such as integers in an F32 workspace.
    pub(crate) fn reinterpreted(buffer: &Buffer, offset: usize, dtype: DType) -> Self {
        let address = buffer.address() + offset * buffer.dtype().size_in_bytes();
        Self::Pointer { address, dtype }
    }
}

/// A whole buffer as a matrix: its last axis is a row. U8 elements are codes of F8E4M3 numbers.
impl From<&Buffer> for Operand {
    fn from(buffer: &Buffer) -> Self {
        let stride = buffer.shape().last().copied().unwrap_or(1);
        let dtype = if buffer.dtype() == DType::U8 { DType::F8E4M3 } else { buffer.dtype() };
        let (address, elements) = (buffer.address(), buffer.elements());
        Self { address, dtype, stride, transposed: false, elements }
    }
}

impl From<&mut Buffer> for Operand {
    fn from(buffer: &mut Buffer) -> Self {
        Self::from(&*buffer)
    }
}

impl Workspace {
    /// Returns the workspace in an F32 buffer, from its first multiple of 256 bytes on: at least 32 MiB of a buffer of
    /// [`crate::cuda::WORKSPACE_ELEMENTS`], wherever it lies.
    pub(crate) fn from_buffer(buffer: &Buffer) -> Self {
        let end = buffer.address() + buffer.elements() * buffer.dtype().size_in_bytes();
        let address = buffer.address().next_multiple_of(WORKSPACE_ALIGNMENT);
        Self { address, bytes: end.saturating_sub(address) }
    }
}
