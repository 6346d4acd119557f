//! Writes tiles: into `out`, or into partial sums over the first blocks of K.

use std::ops::Range;

use candle_core::DType;
use pulp::{Simd, WithSimd};

use super::matrix::extent;
use super::micro_kernel::{MAX_TILE, MicroKernel};
use crate::Element;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::simd::{Body, prefetch_to_write};

/// The place of a block in memory: element (row, column) is at `first + row * stride + column`.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pub(super) first: usize,
    pub(super) stride: usize,
}

/// The initial values that a tile is added to.
pub(super) enum Start<'a> {
    Zero,
    /// The elements of `out`.
    Output,
    /// Partial sums over the previous blocks of K.
    Partial(&'a Disjoint<'a, f32>, Origin),
}

/// A block of `out`; every tile is written by one thread.
pub(super) struct OutputBlock<'a, O> {
    pub(super) out: &'a Disjoint<'a, O>,
    pub(super) origin: Origin,
    pub(super) start: Start<'a>,
}

impl<O: Element> OutputBlock<'_, O> {
    /// Prefetches the elements of a tile, which are written once it is computed.
    #[inline(always)]
    pub(super) fn prefetch(&self, rows: Range<usize>, columns: Range<usize>) {
        let Origin { first, stride } = self.origin;
        for row in rows {
            prefetch_to_write(self.out.address(first + row * stride + columns.start, columns.len()), columns.len());
        }
    }

    /// Writes a tile to these rows and columns of the block.
    ///
    /// # Safety
    /// No other thread accesses this tile.
    pub(super) unsafe fn write_tile<T: MicroKernel>(
        &self,
        kernel: T,
        tile: &[f32; MAX_TILE],
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        let whole = columns.len() == T::NR;
        let of = TileResult { sums: tile, rows, columns };
        // SAFETY: as promised by the caller.
        unsafe {
            match self.start {
                Start::Zero if whole && O::DTYPE == DType::F32 => self.write_vectors(kernel, &of, false),
                Start::Output if whole && O::DTYPE == DType::F32 => self.write_vectors(kernel, &of, true),
                Start::Zero => self.write_rows(kernel, &of, |out, sums, _| {
                    for (out, &sum) in out.iter_mut().zip(sums) {
                        *out = O::narrow(sum);
                    }
                }),
                Start::Output => self.write_rows(kernel, &of, |out, sums, _| {
                    for (out, &sum) in out.iter_mut().zip(sums) {
                        *out = O::narrow(out.widen() + sum);
                    }
                }),
                Start::Partial(partials, origin) => self.write_rows(kernel, &of, |out, sums, row| {
                    let before = partials.part(origin.first + row * origin.stride + of.columns.start, out.len());
                    for ((out, &sum), &before) in out.iter_mut().zip(sums).zip(before.iter()) {
                        *out = O::narrow(before + sum);
                    }
                }),
            }
        }
    }

    /// Writes a tile row by row. Loops over full rows have a constant length, which lets the compiler vectorise them.
    ///
    /// # Safety
    /// No other thread accesses the tile.
    #[inline(always)]
    unsafe fn write_rows<T: MicroKernel>(
        &self,
        kernel: T,
        of: &TileResult<'_>,
        write: impl Fn(&mut [O], &[f32], usize),
    ) {
        let Origin { first, stride } = self.origin;
        let rows = || of.rows.clone().zip(of.sums.chunks_exact(T::NR));
        // SAFETY: as promised by the caller.
        let out = |row: usize| unsafe { self.out.part(first + row * stride + of.columns.start, of.columns.len()) };
        if of.columns.len() == T::NR {
            kernel.simd().vectorize(Body(
                #[inline(always)]
                || rows().for_each(|(row, sums)| write(&mut out(row)[..T::NR], sums, row)),
            ));
        } else {
            rows().for_each(|(row, sums)| write(out(row), sums, row));
        }
    }

    /// Writes a tile of f32 with all NR columns.
    ///
    /// # Safety
    /// No other thread accesses the tile, and `O` is f32.
    unsafe fn write_vectors<T: MicroKernel>(&self, kernel: T, of: &TileResult<'_>, add: bool) {
        let Origin { first, stride } = self.origin;
        let rows = of.rows.len();
        let (first, count) = (first + of.rows.start * stride + of.columns.start, extent(rows, T::NR, stride));
        let out = self.out.address(first, count).cast();
        let sums = of.sums.chunks_exact(T::NR).take(rows);
        kernel.simd().vectorize(WriteVectors { out, stride, sums, add });
    }
}

/// A computed tile with its rows and columns of the block.
struct TileResult<'a> {
    sums: &'a [f32; MAX_TILE],
    rows: Range<usize>,
    columns: Range<usize>,
}

struct WriteVectors<I> {
    out: *mut f32,
    stride: usize,
    sums: I,
    add: bool,
}

impl<'a, I: Iterator<Item = &'a [f32]>> WithSimd for WriteVectors<I> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (i, sums) in self.sums.enumerate() {
            // SAFETY: inside of a tile that only this thread accesses, see `write_vectors`.
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
