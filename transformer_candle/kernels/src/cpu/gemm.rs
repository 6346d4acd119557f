//! Matrix products in f32, through crate `gemm`, of f32 or bf16 operands.
//!
//! Legend: `out_MN = a_MK b_KN`. Every element of `out` is one sum over K, in an order that depends on M, N, K and the
//! machine's caches only: `gemm` shares out tiles of `out` among the current pool's threads, never a sum. (It takes one
//! thread below 590 thousand multiplications, and where M or N is 1.)

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::cast::{narrow_piece, widen_piece};
use crate::Element;

/// Rows, columns and depth of the blocks in which bf16 operands are widened.
const BLOCK_M: usize = 512;
const BLOCK_N: usize = 512;
const BLOCK_K: usize = 1024;
/// Elements between the rows of a widened block, so that they do not all fall into the same cache sets.
const PADDING: usize = 16;

/// A matrix in row-major storage, or the transpose of one.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    values: &'a [E],
    rows: usize,
    columns: usize,
    /// Elements from one stored row to the next.
    stride: usize,
    transposed: bool,
}

impl<'a, E: Element> Matrix<'a, E> {
    pub(crate) fn new(values: &'a [E], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// The first `columns` elements of rows that lie `stride` elements apart.
    pub(crate) fn strided(values: &'a [E], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(columns <= stride && values.len() >= extent(rows, columns, stride));
        Self { values, rows, columns, stride, transposed: false }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// Some of the rows and columns.
    fn part(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let (first, from) = if self.transposed { (columns.start, rows.start) } else { (rows.start, columns.start) };
        let values = &self.values[first * self.stride + from..];
        Self { values, rows: rows.len(), columns: columns.len(), ..self }
    }

    /// The matrix in f32: itself, or widened into `space`.
    fn widened<'s>(self, space: &'s mut [f32]) -> Matrix<'s, f32>
    where
        'a: 's,
    {
        let (values, stride) = match E::as_f32(self.values) {
            Some(values) => (values, self.stride),
            None => self.widen_rows(space),
        };
        Matrix { values, rows: self.rows, columns: self.columns, stride, transposed: self.transposed }
    }

    /// The stored rows in f32, and the elements from one to the next.
    fn widen_rows(self, space: &mut [f32]) -> (&[f32], usize) {
        let (height, width) = self.stored_size();
        let stride = width + PADDING;
        let space = &mut space[..height * stride];
        let rows = space.par_chunks_mut(stride).zip(self.values.par_chunks(self.stride));
        rows.for_each(|(wide, stored)| widen_piece(&stored[..width], &mut wide[..width]));
        (space, stride)
    }

    /// Rows and columns as they are stored.
    fn stored_size(&self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }

    /// Elements from the first to the last, stored as it is.
    fn extent(&self) -> usize {
        let (height, width) = self.stored_size();
        extent(height, width, self.stride)
    }

    /// Elements from row to row and from column to column.
    fn strides(&self) -> (isize, isize) {
        let stride = self.stride as isize;
        if self.transposed { (1, stride) } else { (stride, 1) }
    }
}

/// `out_MN = a_MK b_KN`, rounded once. The rows of `out` lie `stride` elements apart.
pub(crate) fn multiply<A: Element, B: Element, O: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [O],
    stride: usize,
    workspace: &mut [f32],
) {
    if let Some(out) = O::as_f32_mut(out) {
        return product(a, b, out, stride, false, workspace);
    }
    let (tile, workspace) = workspace.split_at_mut(a.rows.min(BLOCK_M) * b.columns.min(BLOCK_N));
    for rows in steps(a.rows, BLOCK_M) {
        for columns in steps(b.columns, BLOCK_N) {
            let tile = &mut tile[..rows.len() * columns.len()];
            let (a, b) = (a.part(rows.clone(), 0..a.columns), b.part(0..b.rows, columns.clone()));
            product(a, b, tile, columns.len(), false, workspace);
            let out = &mut out[rows.start * stride + columns.start..];
            out.par_chunks_mut(stride).zip(tile.par_chunks(columns.len())).for_each(|(out, sums)| {
                narrow_piece(sums, &mut out[..sums.len()]);
            });
        }
    }
}

/// `out_MN += a_MK b_KN`. The rows of `out` lie `stride` elements apart.
pub(crate) fn multiply_add<A: Element, B: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [f32],
    stride: usize,
    workspace: &mut [f32],
) {
    product(a, b, out, stride, true, workspace);
}

/// Elements of workspace that a product needs whose operands or result are not f32; at most 1.4 million.
pub(crate) fn workspace_for(m: usize, n: usize, k: usize) -> usize {
    let (m, n, k) = (m.min(BLOCK_M), n.min(BLOCK_N), k.min(BLOCK_K));
    m * n + panel_for(m, k) + panel_for(k, n)
}

/// Elements of a widened block, whichever of its sizes is the width.
fn panel_for(rows: usize, columns: usize) -> usize {
    rows * columns + PADDING * rows.max(columns)
}

/// One call of `gemm` where both operands are f32, else one a block.
fn product<A: Element, B: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [f32],
    stride: usize,
    accumulate: bool,
    workspace: &mut [f32],
) {
    assert_eq!(a.columns, b.rows);
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    if let (Some(_), Some(_)) = (A::as_f32(a.values), B::as_f32(b.values)) {
        return gemm_f32(a.widened(&mut []), b.widened(&mut []), out, stride, accumulate);
    }
    let (space_a, space_b) = workspace.split_at_mut(panel_for(a.rows.min(BLOCK_M), a.columns.min(BLOCK_K)));
    for columns in steps(b.columns, BLOCK_N) {
        for depth in steps(a.columns, BLOCK_K) {
            let b = b.part(depth.clone(), columns.clone()).widened(space_b);
            for rows in steps(a.rows, BLOCK_M) {
                let a = a.part(rows.clone(), depth.clone()).widened(space_a);
                let out = &mut out[rows.start * stride + columns.start..];
                gemm_f32(a, b, out, stride, accumulate || depth.start > 0);
            }
        }
    }
}

fn gemm_f32(a: Matrix<'_, f32>, b: Matrix<'_, f32>, out: &mut [f32], stride: usize, accumulate: bool) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && n <= stride && out.len() >= extent(m, n, stride));
    assert!(a.values.len() >= a.extent() && b.values.len() >= b.extent());
    let ((a_row, a_column), (b_row, b_column)) = (a.strides(), b.strides());
    // SAFETY: the asserts above keep every element that the sizes and strides reach inside of the three slices; `out` is
    // borrowed mutably, so the operands do not overlap it.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            accumulate,
            a.values.as_ptr(),
            a_column,
            a_row,
            b.values.as_ptr(),
            b_column,
            b_row,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

/// Elements from the first to the last of so many rows.
fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

fn steps(size: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size).step_by(step).map(move |start| start..size.min(start + step))
}
