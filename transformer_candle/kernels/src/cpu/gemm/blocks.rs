//! A product cut in blocks, blocks in cells, cells in tiles.

use pulp::Simd;
use rayon::prelude::*;

use super::panels::pack;
use super::tile::{SUMS, Tile};
use super::{BLOCK_K, BLOCK_M, BLOCK_N, Matrix, extent, steps};
use crate::Element;
use crate::cpu::disjoint::{ALIGNMENT, Disjoint, aligned};
use crate::cpu::simd::Body;

/// Panels of either operand that a thread multiplies at a time: what its second-level cache holds.
const CELL_ROWS: usize = 4;
const CELL_COLUMNS: usize = 8;
/// Cells that a block is cut in at least, if it has the rows, so that all threads have something to do.
const CELLS: usize = 16;
/// The widest panels of any tile.
const WIDEST: usize = 32;

/// A product: `out_MN = a_MK b_KN`, or added to it.
pub(super) struct Blocks<'a, A, B, O> {
    pub(super) a: Matrix<'a, A>,
    pub(super) b: Matrix<'a, B>,
    pub(super) out: &'a mut [O],
    /// Elements from row to row of `out`.
    pub(super) stride: usize,
    pub(super) accumulate: bool,
    pub(super) workspace: &'a mut [f32],
}

/// Elements for the panels of a block.
pub(super) fn workspace_for(m: usize, n: usize, k: usize) -> usize {
    ALIGNMENT + (m + n + 2 * WIDEST).next_multiple_of(16) * k
}

impl<A: Element, B: Element, O: Element> Blocks<'_, A, B, O> {
    pub(super) fn multiply<T: Tile>(self, tile: T) {
        let Self { a, b, out, stride, accumulate, workspace } = self;
        assert!(b.columns <= stride && out.len() >= extent(a.rows, b.columns, stride));
        if a.rows == 0 || b.columns == 0 || (a.columns == 0 && accumulate) {
            return;
        }
        let out = Disjoint::new(out);
        for columns in steps(b.columns, BLOCK_N) {
            for depth in steps(a.columns.max(1), BLOCK_K) {
                let depth = depth.start..depth.end.min(a.columns);
                let places = depth.len().div_ceil(T::DEPTH);
                let (b_panels, a_panels) =
                    aligned(workspace).split_at_mut(columns.len().next_multiple_of(T::COLUMNS) * places);
                let b = b.part(depth.clone(), columns.clone()).transposed();
                for rows in steps(a.rows, BLOCK_M) {
                    let a_panels = &mut a_panels[..rows.len().next_multiple_of(T::ROWS) * places];
                    let mut pack_a = || pack_all(tile, a.part(rows.clone(), depth.clone()), a_panels, T::ROWS, places);
                    let pack_b = || pack_all(tile, b, b_panels, T::COLUMNS, places);
                    if rows.start == 0 {
                        rayon::join(pack_a, pack_b);
                    } else {
                        pack_a();
                    }
                    let target = Target {
                        out: &out,
                        first: rows.start * stride + columns.start,
                        stride,
                        rows: rows.len(),
                        columns: columns.len(),
                        accumulate: accumulate || depth.start > 0,
                    };
                    multiply_panels(tile, a_panels, b_panels, places, &target);
                }
            }
        }
    }
}

fn pack_all<T: Tile, E: Element>(tile: T, matrix: Matrix<'_, E>, panels: &mut [f32], width: usize, places: usize) {
    if places == 0 {
        return;
    }
    panels.par_chunks_exact_mut(width * places).enumerate().for_each(|(index, panel)| {
        let first = index * width;
        let rows = matrix.part(first..matrix.rows.min(first + width), 0..matrix.columns);
        tile.simd().vectorize(Body(
            #[inline(always)]
            || pack::<T, E>(rows, panel, width),
        ));
    });
}

/// Where the sums of a block go.
struct Target<'a, O> {
    out: &'a Disjoint<'a, O>,
    /// The element of `out` that the block begins with.
    first: usize,
    stride: usize,
    rows: usize,
    columns: usize,
    accumulate: bool,
}

fn multiply_panels<T: Tile, O: Element>(tile: T, a: &[f32], b: &[f32], places: usize, target: &Target<'_, O>) {
    let (tall, wide) = (target.rows.div_ceil(T::ROWS), target.columns.div_ceil(T::COLUMNS));
    let across = wide.div_ceil(CELL_COLUMNS);
    let cell_rows = CELL_ROWS.min((tall * across).div_ceil(CELLS));
    let cells = tall.div_ceil(cell_rows) * across;
    (0..cells).into_par_iter().with_max_len(1).for_each(|cell| {
        let (top, left) = (cell / across * cell_rows, cell % across * CELL_COLUMNS);
        tile.simd().vectorize(Body(
            #[inline(always)]
            || {
                let mut sums = Sums([0.0; SUMS]);
                for column in left..wide.min(left + CELL_COLUMNS) {
                    for row in top..tall.min(top + cell_rows) {
                        let (a, b) = (panel(a, row, T::ROWS * places), panel(b, column, T::COLUMNS * places));
                        tile.sum(a, b, &mut sums.0);
                        target.keep::<T>(&sums.0, row * T::ROWS, column * T::COLUMNS);
                    }
                }
            },
        ));
    });
}

fn panel(panels: &[f32], index: usize, size: usize) -> &[f32] {
    &panels[index * size..][..size]
}

#[repr(align(64))]
struct Sums([f32; SUMS]);

impl<O: Element> Target<'_, O> {
    /// Writes a tile's sums from this row and column of the block on.
    #[inline(always)]
    fn keep<T: Tile>(&self, sums: &[f32; SUMS], row: usize, column: usize) {
        let (rows, columns) = (T::ROWS.min(self.rows - row), T::COLUMNS.min(self.columns - column));
        for (i, sums) in sums.chunks_exact(T::COLUMNS).take(rows).enumerate() {
            // SAFETY: an element belongs to one tile, and a tile to one cell.
            let out = unsafe { self.out.part(self.first + (row + i) * self.stride + column, columns) };
            // The compiler knows the length of a whole row, and makes vectors of loops over it.
            if columns == T::COLUMNS {
                self.keep_row(&mut out[..T::COLUMNS], sums);
            } else {
                self.keep_row(out, sums);
            }
        }
    }

    #[inline(always)]
    fn keep_row(&self, out: &mut [O], sums: &[f32]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = O::narrow(if self.accumulate { out.widen() + sum } else { sum });
        }
    }
}
