//! The operands of a GEMM, and the ranges that its loops step through.

use std::ops::Range;

use crate::Element;

/// A matrix in row-major storage, or the transpose of one.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    pub(super) values: &'a [E],
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Elements from one stored row to the next.
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

impl<'a, E: Element> Matrix<'a, E> {
    pub(crate) fn new(values: &'a [E], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// A matrix of the first `columns` elements of rows that lie `stride` elements apart.
    pub(crate) fn strided(values: &'a [E], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(columns <= stride && values.len() >= extent(rows, columns, stride));
        Self { values, rows, columns, stride, transposed: false }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// A submatrix.
    pub(super) fn submatrix(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let (first, from) = if self.transposed { (columns.start, rows.start) } else { (rows.start, columns.start) };
        let values = &self.values[(first * self.stride + from).min(self.values.len())..];
        Self { values, rows: rows.len(), columns: columns.len(), ..self }
    }
}

/// The number of elements from the first to the last of a matrix, those between its rows included.
pub(super) fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

/// `0..size` in ranges of `step`, the last one shorter.
pub(super) fn steps(size: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size).step_by(step).map(move |start| start..size.min(start + step))
}

/// Chunk `index` of `size` elements of `0..end`.
pub(super) fn chunk(index: usize, size: usize, end: usize) -> Range<usize> {
    index * size..end.min((index + 1) * size)
}
