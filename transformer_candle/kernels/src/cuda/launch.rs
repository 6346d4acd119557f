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

/// `c = a b` or `c += a b` of row-major matrices, a [m, k], b [k, n], c [m, n], either operand stored transposed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result.
    pub(crate) n: usize,
    /// What is summed over.
    pub(crate) k: usize,
    /// F32 or BF16 elements.
    pub(crate) a: Operand,
    /// Of the same element type as `a`.
    pub(crate) b: Operand,
    /// Where the result goes; F32, or the operands' type.
    pub(crate) c: Operand,
    /// Whether the result is added to what is there.
    pub(crate) accumulate: bool,
    /// Scratch that the library may use while the product runs.
    pub(crate) workspace: Workspace,
}

/// Scratch memory on the card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workspace {
    /// Of its first byte.
    pub(crate) address: usize,
    /// Its size.
    pub(crate) bytes: usize,
}

/// A matrix in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    /// Of the first element.
    pub(crate) address: usize,
    /// F32 or BF16.
    pub(crate) dtype: DType,
    /// Elements from one stored row to the next.
    pub(crate) stride: usize,
    /// Whether the stored rows are the matrix's columns. Never so for a result.
    pub(crate) transposed: bool,
}
