//! Matrix products of f32 or bf16 operands, summed in f32.
//!
//! Legend: `out_MN = a_MK b_KN`. Operands are cut in blocks that the caches hold ([`blocks`]). What is multiplied together lies
//! together in panels, for which a block is packed ([`panels`]) unless it can be read where it lies ([`places`]); a tile of `out`
//! is summed in registers ([`tile`]) and written ([`target`]). A single row reads its matrix once ([`row`]).
//!
//! Every element of `out` is one sum over K in ascending order, begun anew with every block of K; of a single row, several sums
//! beside each other. Two bf16 operands are multiplied as they are where the machine can ([`pairs`]), two elements of K at a time, else
//! in f32. An f32 operand beside a bf16 one is rounded for that if the result is bf16 too. What the sums are depends on the operands
//! and on the machine's instructions alone: threads share out tiles, never a sum.

mod blocks;
mod pairs;
mod panels;
mod places;
mod row;
mod target;
mod tile;

use std::ops::Range;

use candle_core::DType;
use pulp::{Arch, Simd, WithSimd};

use self::blocks::Blocks;
pub(crate) use self::blocks::workspace_for;
use self::tile::Vectors;
use crate::{Element, WriteMode};

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
        let values = &self.values[(first * self.stride + from).min(self.values.len())..];
        Self { values, rows: rows.len(), columns: columns.len(), ..self }
    }
}

/// `out_MN = a_MK b_KN`. The rows of `out` lie `stride` elements apart.
pub(crate) fn multiply<A: Element, B: Element, O: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [O],
    stride: usize,
    workspace: &mut [f32],
) {
    if a.rows == 1 && !a.transposed && b.transposed {
        return row::multiply(a, b, out);
    }
    multiply_accumulate(a, b, out, stride, WriteMode::Overwrite, workspace);
}

/// `out_MN = a_MK b_KN` or `out_MN += a_MK b_KN`, with what multiplies fastest on this machine. The rows of `out` lie `stride`
/// elements apart.
pub(crate) fn multiply_accumulate<A: Element, B: Element, O: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [O],
    stride: usize,
    write_mode: WriteMode,
    workspace: &mut [f32],
) {
    assert_eq!(a.columns, b.rows);
    let blocks = Blocks { a, b, out, stride, write_mode, workspace };
    let in_bf16 = B::DTYPE == DType::BF16 && (A::DTYPE == DType::BF16 || O::DTYPE == DType::BF16);
    match pairs::Pairs::of_this_machine() {
        Some(pairs) if in_bf16 => blocks.multiply(pairs),
        _ => Arch::new().dispatch(InVectors(blocks)),
    }
}

/// A product in f32, in the vectors that the machine has.
struct InVectors<'a, A, B, O>(Blocks<'a, A, B, O>);

impl<A: Element, B: Element, O: Element> WithSimd for InVectors<'_, A, B, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 {
            self.0.multiply(Vectors::<S, 14, 2>(simd));
        } else {
            self.0.multiply(Vectors::<S, 6, 2>(simd));
        }
    }
}

/// Elements from the first to the last of so many rows.
fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

fn steps(size: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size).step_by(step).map(move |start| start..size.min(start + step))
}

/// Piece `index` of `size` of what ends at `end`.
fn piece(index: usize, size: usize, end: usize) -> Range<usize> {
    index * size..end.min((index + 1) * size)
}

#[cfg(test)]
mod tests;
