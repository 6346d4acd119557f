//! Operands of the tile GEMMs.

/// Columns are padded to a multiple of this, the f32 of an AVX-512 vector; every other width divides it.
pub(super) const COLUMNS: usize = 16;

/// The left operand: element (i, k) is at `i * row_stride + k * depth_stride`.
#[derive(Clone, Copy)]
pub(super) struct LeftOperand<'a> {
    pub(super) values: &'a [f32],
    pub(super) row_stride: usize,
    pub(super) depth_stride: usize,
}

impl<'a> LeftOperand<'a> {
    /// An operand whose rows lie `stride` elements apart.
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, depth_stride: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self { row_stride: self.depth_stride, depth_stride: self.row_stride, ..self }
    }
}
