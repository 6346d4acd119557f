//! A product cut in blocks that the caches hold.
//!
//! All threads pack a block of the right operand. Then each takes strips of rows until none is left and multiplies them with the
//! whole block; what cannot be read in place of its strip of the left operand it packs in memory of its own.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::panels::{Panels, pack, pack_columns, pack_rows};
use super::places::{Columns, Rows};
use super::target::{Corner, Start, Target};
use super::tile::{PLACES, ROW_STRIDE, SUMS, Tile};
use super::{Matrix, extent, piece, steps};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::share_out::share_out;
use crate::cpu::simd::Body;
use crate::cpu::transpose::SIDE;
use crate::{Element, WriteMode};

/// Places of a block of the right operand: 4 MiB, a part of a third-level cache.
const RIGHT: usize = 1 << 20;
/// Places of a strip of the left operand: 256 KiB, a part of a second-level cache.
const STRIP: usize = 1 << 16;
/// Panels of a strip: the rows of more would lie in more pages than the processor remembers.
const STRIP_PANELS: usize = 4;
/// Pieces that the last panels are shared out in.
const GROUPS: usize = 4;
/// Rows that the strips of a moment have together.
const STRIP_ROWS: usize = 896;
/// Sums over blocks of K that wait for the next where `out` cannot hold them.
const WAITING: usize = 1 << 20;
/// The widest panels of any tile; all others divide it.
const WIDEST: usize = 32;

/// A product: `out_MN = a_MK b_KN`, or added to it.
pub(super) struct Blocks<'a, A, B, O> {
    pub(super) a: Matrix<'a, A>,
    pub(super) b: Matrix<'a, B>,
    pub(super) out: &'a mut [O],
    /// Elements from row to row of `out`.
    pub(super) stride: usize,
    pub(super) write_mode: WriteMode,
    pub(super) workspace: &'a mut [f32],
}

/// Elements of workspace that a product of any tile needs, at most 3 million.
pub(crate) fn workspace_for(m: usize, n: usize, k: usize) -> usize {
    let right = RIGHT.min(n.next_multiple_of(WIDEST) * k.min(PLACES));
    let waiting = if k > PLACES { WAITING.min(m * n) } else { 0 };
    right + STRIP_ROWS * ROW_STRIDE + waiting
}

impl<A: Element, B: Element, O: Element> Blocks<'_, A, B, O> {
    pub(super) fn multiply<T: Tile>(self, tile: T) {
        let Self { a, b, out, stride, write_mode, workspace } = self;
        assert!(b.columns <= stride && out.len() >= extent(a.rows, b.columns, stride));
        if a.rows == 0 || b.columns == 0 || a.columns == 0 {
            // Sums of nothing.
            let rows = out.chunks_mut(stride.max(1)).take(a.rows);
            if write_mode == WriteMode::Overwrite {
                rows.for_each(|row| row[..b.columns].fill(O::default()));
            }
            return;
        }
        let depth = even_step(a.columns, PLACES * T::DEPTH, SIDE * T::DEPTH);
        let places = depth.min(a.columns).div_ceil(T::DEPTH);
        let width = even_step(b.columns, RIGHT / places, T::COLUMNS);
        let waits = depth < a.columns && size_of::<O>() < size_of::<f32>();
        let height = if waits { WAITING / width.min(b.columns) } else { a.rows };
        let (right, rest) = workspace.split_at_mut(width * places);
        let (strips, waiting) = rest.split_at_mut(STRIP_ROWS * ROW_STRIDE);
        let (out, waiting) = (Disjoint::new(out), Disjoint::new(waiting));
        for rows in steps(a.rows, height) {
            for columns in steps(b.columns, width) {
                let corner = Corner { first: rows.start * stride + columns.start, stride };
                let wait = Corner { first: 0, stride: columns.len() };
                for depth in steps(a.columns, depth) {
                    let right = Right::of(tile, b.part(depth.clone(), columns.clone()).transposed(), right);
                    let a = a.part(rows.clone(), depth.clone());
                    let product =
                        Product { tile, a, right, columns: columns.len(), places: a.columns.div_ceil(T::DEPTH) };
                    let again = if depth.start > 0 { Start::Kept } else { Start::Zero };
                    if !waits {
                        let start = if write_mode == WriteMode::Accumulate { Start::Kept } else { again };
                        product.sum(strips, &Target { out: &out, corner, start });
                    } else if depth.end < b.rows {
                        product.sum(strips, &Target { out: &waiting, corner: wait, start: again });
                    } else {
                        product.sum(strips, &Target { out: &out, corner, start: Start::Waiting(&waiting, wait) });
                    }
                }
            }
        }
    }
}

/// A multiple of `unit`, at most `most`, that cuts `size` in pieces as few and as even as possible.
fn even_step(size: usize, most: usize, unit: usize) -> usize {
    let pieces = size.div_ceil(most / unit * unit).max(1);
    size.div_ceil(pieces).next_multiple_of(unit).max(unit)
}

/// A block of the right operand.
#[derive(Clone, Copy)]
struct Right<'a> {
    columns: Columns<'a>,
    /// Places from panel to panel.
    stride: usize,
}

impl<'a> Right<'a> {
    /// Of the block's transpose, in place or packed.
    fn of<T: Tile, B: Element>(tile: T, b: Matrix<'a, B>, panels: &'a mut [f32]) -> Self {
        if b.rows.is_multiple_of(T::COLUMNS)
            && let Some(columns) = Columns::of::<T, B>(b)
        {
            return Self { columns, stride: T::COLUMNS };
        }
        let columns = Columns { places: pack_right(tile, b, panels), stride: T::COLUMNS };
        Self { columns, stride: b.columns.div_ceil(T::DEPTH) * T::COLUMNS }
    }
}

/// Packs the columns of the right operand, which are the rows of its transpose.
fn pack_right<'a, T: Tile, B: Element>(tile: T, b: Matrix<'_, B>, panels: &'a mut [f32]) -> &'a [f32] {
    let places = b.columns.div_ceil(T::DEPTH);
    let panels = &mut panels[..b.rows.next_multiple_of(T::COLUMNS) * places];
    panels.par_chunks_exact_mut(T::COLUMNS * places).enumerate().for_each(|(index, panel)| {
        let columns = b.part(piece(index, T::COLUMNS, b.rows), 0..b.columns);
        tile.simd().vectorize(Body(
            #[inline(always)]
            || pack::<T, B>(columns, panel),
        ));
    });
    panels
}

/// The rows of a left operand times a packed block.
struct Product<'a, T, A> {
    tile: T,
    a: Matrix<'a, A>,
    right: Right<'a>,
    columns: usize,
    places: usize,
}

impl<T: Tile, A: Element> Product<'_, T, A> {
    /// Sums in all threads, each in its part of `strips`.
    fn sum<O: Element>(&self, strips: &mut [f32], target: &Target<'_, O>) {
        let threads = rayon::current_num_threads();
        let panels = Panels::of::<T>(self.a.rows, threads);
        let (tall, wide) = (panels.count, self.columns.div_ceil(T::COLUMNS));
        // Where few panels are left, their columns are shared out too, unless a panel would be packed again for each piece.
        let pieces = if Strip::in_place::<T, A>(self.a) { GROUPS } else { 1 };
        let groups = wide.min(pieces.max((2 * threads).div_ceil(tall)));
        let fitting = (STRIP / (T::ROWS * self.places)).min(STRIP_ROWS / T::ROWS / threads);
        let longest = fitting.clamp(1, STRIP_PANELS);
        share_out(tall * groups, groups, longest * groups, strips, longest * T::ROWS * ROW_STRIDE, |share, strip| {
            let numbers = share.start / groups..share.end.div_ceil(groups);
            let (first, last) = (share.start % groups, (share.end - 1) % groups);
            let columns = first * wide / groups..(last + 1) * wide / groups;
            self.tile.simd().vectorize(Body(
                #[inline(always)]
                || self.sum_strip(panels, numbers.clone(), columns.clone(), strip, target),
            ));
        });
    }

    /// Sums the tiles in some panels of rows and of columns, by their numbers.
    #[inline(always)]
    fn sum_strip<O: Element>(
        &self,
        panels: Panels,
        numbers: Range<usize>,
        columns: Range<usize>,
        strip: &mut [f32],
        target: &Target<'_, O>,
    ) {
        let Self { tile, a, right, places, .. } = *self;
        let all = panels.rows(numbers.clone());
        let within = numbers.map(|number| {
            let rows = panels.rows(number..number + 1);
            rows.start - all.start..rows.end - all.start
        });
        let left = Strip::of::<T, A>(a.part(all.clone(), 0..a.columns), within.clone(), strip);
        let mut sums = Sums([0.0; SUMS]);
        for column in columns {
            let b = right.columns.from(column * right.stride);
            for (panel, rows) in within.clone().enumerate() {
                match left {
                    Strip::Rows(left) => tile.sum(rows.len(), places, left.part(rows.clone()), b, &mut sums.0),
                    Strip::Columns(columns) => tile.sum(rows.len(), places, columns.from(rows.start), b, &mut sums.0),
                    Strip::Packed(columns) => {
                        tile.sum(rows.len(), places, columns.from(panel * T::ROWS * ROW_STRIDE), b, &mut sums.0);
                    }
                }
                let rows = all.start + rows.start..all.start + rows.end;
                let columns = piece(column, T::COLUMNS, self.columns);
                // SAFETY: a tile belongs to one share.
                unsafe { target.keep(tile, &sums.0, rows, columns) };
            }
        }
    }
}

/// A strip of the left operand.
#[derive(Clone, Copy)]
enum Strip<'a> {
    Rows(Rows<'a>),
    /// The columns of its transpose.
    Columns(Columns<'a>),
    /// These in panels.
    Packed(Columns<'a>),
}

impl<'a> Strip<'a> {
    /// Whether strips of a left operand need not be packed.
    fn in_place<T: Tile, A: Element>(a: Matrix<'_, A>) -> bool {
        if a.transposed { Columns::of::<T, A>(a).is_some() } else { Rows::of::<T, A>(a).is_some() }
    }

    /// Some rows of the left operand, in place or packed in these panels.
    #[inline(always)]
    fn of<T: Tile, A: Element>(
        a: Matrix<'a, A>,
        panels: impl Iterator<Item = Range<usize>> + Clone,
        packed: &'a mut [f32],
    ) -> Self {
        if !a.transposed {
            return Self::Rows(Rows::of::<T, A>(a).unwrap_or_else(|| pack_rows::<T, A>(a, packed)));
        }
        let whole = panels.clone().all(|rows| T::height(rows.len()) == rows.len());
        if whole && let Some(columns) = Columns::of::<T, A>(a) {
            return Self::Columns(columns);
        }
        pack_columns::<T, A>(a, panels, packed, T::ROWS, T::ROWS * ROW_STRIDE);
        Self::Packed(Columns { places: packed, stride: T::ROWS })
    }
}

#[repr(align(64))]
struct Sums([f32; SUMS]);
