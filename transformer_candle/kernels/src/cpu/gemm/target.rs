//! Where sums go: into `out`, or to other sums first.

use std::ops::Range;

use candle_core::DType;
use pulp::{Simd, WithSimd};

use super::extent;
use super::tile::{SUMS, Tile};
use crate::Element;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::simd::Body;

/// Where a block lies: its elements at `first + row * stride + column`.
#[derive(Clone, Copy)]
pub(super) struct Corner {
    pub(super) first: usize,
    pub(super) stride: usize,
}

/// What sums are added to.
pub(super) enum Start<'a> {
    Zero,
    /// What lies in `out`.
    Kept,
    /// Sums over the blocks of K before.
    Waiting(&'a Disjoint<'a, f32>, Corner),
}

/// A block of `out`, of which each tile belongs to one task.
pub(super) struct Target<'a, O> {
    pub(super) out: &'a Disjoint<'a, O>,
    pub(super) corner: Corner,
    pub(super) start: Start<'a>,
}

impl<O: Element> Target<'_, O> {
    /// Writes the sums of a tile that lies in these rows and columns of the block.
    ///
    /// # Safety
    /// No other task uses this tile.
    pub(super) unsafe fn keep<T: Tile>(&self, tile: T, sums: &[f32; SUMS], rows: Range<usize>, columns: Range<usize>) {
        let whole = columns.len() == T::COLUMNS;
        let of = TileOf { sums, rows, columns };
        // SAFETY: as promised by the caller.
        unsafe {
            match self.start {
                Start::Zero if whole && O::DTYPE == DType::F32 => self.keep_vectors(tile, &of, false),
                Start::Kept if whole && O::DTYPE == DType::F32 => self.keep_vectors(tile, &of, true),
                Start::Zero => self.keep_rows(tile, &of, |out, sums, _| {
                    for (out, &sum) in out.iter_mut().zip(sums) {
                        *out = O::narrow(sum);
                    }
                }),
                Start::Kept => self.keep_rows(tile, &of, |out, sums, _| {
                    for (out, &sum) in out.iter_mut().zip(sums) {
                        *out = O::narrow(out.widen() + sum);
                    }
                }),
                Start::Waiting(waiting, corner) => self.keep_rows(tile, &of, |out, sums, row| {
                    let before = waiting.part(corner.first + row * corner.stride + of.columns.start, out.len());
                    for ((out, &sum), &before) in out.iter_mut().zip(sums).zip(before.iter()) {
                        *out = O::narrow(before + sum);
                    }
                }),
            }
        }
    }

    /// Row by row, in loops that the compiler makes vectors of where it knows their length: those of a whole row.
    ///
    /// # Safety
    /// No other task uses the tile.
    #[inline(always)]
    unsafe fn keep_rows<T: Tile>(&self, tile: T, of: &TileOf<'_>, write: impl Fn(&mut [O], &[f32], usize)) {
        let Corner { first, stride } = self.corner;
        let rows = || of.rows.clone().zip(of.sums.chunks_exact(T::COLUMNS));
        // SAFETY: as promised by the caller.
        let out = |row: usize| unsafe { self.out.part(first + row * stride + of.columns.start, of.columns.len()) };
        if of.columns.len() == T::COLUMNS {
            tile.simd().vectorize(Body(
                #[inline(always)]
                || rows().for_each(|(row, sums)| write(&mut out(row)[..T::COLUMNS], sums, row)),
            ));
        } else {
            rows().for_each(|(row, sums)| write(out(row), sums, row));
        }
    }

    /// A tile of f32 that has all columns.
    ///
    /// # Safety
    /// No other task uses the tile, and `O` is f32.
    unsafe fn keep_vectors<T: Tile>(&self, tile: T, of: &TileOf<'_>, add: bool) {
        let Corner { first, stride } = self.corner;
        let rows = of.rows.len();
        let (first, count) = (first + of.rows.start * stride + of.columns.start, extent(rows, T::COLUMNS, stride));
        let out = self.out.address(first, count).cast();
        let sums = of.sums.chunks_exact(T::COLUMNS).take(rows);
        tile.simd().vectorize(KeepVectors { out, stride, sums, add });
    }
}

/// The sums of a tile and where it lies in its block.
struct TileOf<'a> {
    sums: &'a [f32; SUMS],
    rows: Range<usize>,
    columns: Range<usize>,
}

struct KeepVectors<I> {
    out: *mut f32,
    stride: usize,
    sums: I,
    add: bool,
}

impl<'a, I: Iterator<Item = &'a [f32]>> WithSimd for KeepVectors<I> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (i, sums) in self.sums.enumerate() {
            // SAFETY: inside of a tile that is this task's, see `keep_vectors`.
            let row = unsafe { std::slice::from_raw_parts_mut(self.out.add(i * self.stride), sums.len()) };
            let vectors = S::as_mut_simd_f32s(row).0.iter_mut().zip(S::as_simd_f32s(sums).0);
            if self.add {
                vectors.for_each(|(out, sum)| *out = simd.add_f32s(*out, *sum));
            } else {
                vectors.for_each(|(out, sum)| *out = *sum);
            }
        }
    }
}
