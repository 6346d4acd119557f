//! Rounding to e4m3 with block scales on CPU slices. Legend: C columns of a row.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::fp8::{ScaleBlock, TILE};
use crate::{Element, bf16};

/// The bits of a BF16 number without its sign; in this order numbers are in that of their size.
const SIZE_BITS: u16 = 0x7fff;
/// The first of these that is no finite number.
const INFINITY: u16 = 0x7f80;
/// Exponents of scales are from -120 to 120, so that scales and their inverses are normal F32 numbers, and e4m3 numbers
/// times scales are BF16.
const MAX_EXPONENT: i32 = 120;

pub(crate) fn round(x: &[bf16], out: &mut [bf16], columns: usize, block: ScaleBlock) {
    match block {
        ScaleBlock::Tensor => {
            let scale = Scale::of_all(x);
            out.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each_task(|(out, x)| {
                vectorised(
                    #[inline(always)]
                    || scale.round(x, out),
                );
            });
        }
        ScaleBlock::Square128 | ScaleBlock::Square32 => {
            let edge = edge_of(block);
            let rows_of_blocks = (edge * columns).max(1);
            out.par_chunks_mut(rows_of_blocks).zip(x.par_chunks(rows_of_blocks)).for_each_task(|(out, x)| {
                vectorised(
                    #[inline(always)]
                    || round_row_of_blocks(x, out, columns, edge),
                );
            });
        }
    }
}

/// Rounds blocks that lie side by side, each `edge` columns wide: first the largest number of a block's rows, which are in
/// the cache when they are rounded.
#[inline(always)]
fn round_row_of_blocks(x: &[bf16], out: &mut [bf16], columns: usize, edge: usize) {
    for first in (0..columns).step_by(edge) {
        let block = first..columns.min(first + edge);
        let scale = Scale::of(x.chunks_exact(columns).map(|row| largest(&row[block.clone()])).max().unwrap_or(0));
        for (row, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
            scale.round(&row[block.clone()], &mut out[block.clone()]);
        }
    }
}

/// The bits of the largest number, without signs. Those of infinities and NaN are larger than all others.
#[inline(always)]
fn largest(values: &[bf16]) -> u16 {
    values.iter().fold(0, |largest, value| largest.max(value.to_bits() & SIZE_BITS))
}

/// A power of two and its inverse; NaN where nothing fits.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    scale: f32,
    inverse: f32,
}

impl Scale {
    /// The smallest scale with which nothing is larger than 448 = 1.75 * 2^8. A number m * 2^e takes 2^(e - 8) if its m is
    /// at most 1.75, which is a mantissa of 0x60, and twice that if not: adding 0x1f to the mantissa carries then.
    #[inline(always)]
    fn of(largest: u16) -> Self {
        if largest >= INFINITY {
            return Self { scale: f32::NAN, inverse: f32::NAN };
        }
        let exponent = (i32::from((largest + 0x1f) >> 7) - 127 - 8).clamp(-MAX_EXPONENT, MAX_EXPONENT);
        Self { scale: power_of_two(exponent), inverse: power_of_two(-exponent) }
    }

    /// The scale of all numbers.
    fn of_all(values: &[bf16]) -> Self {
        Self::of(values.par_chunks(PIECE).map(largest).max().unwrap_or(0))
    }

    #[inline(always)]
    fn round(self, x: &[bf16], out: &mut [bf16]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = bf16::narrow(nearest_e4m3(x.widen() * self.inverse) * self.scale);
        }
    }

    /// The scale beside codes: where nothing fits the largest one, since the codes themselves are NaN.
    pub(crate) fn stored(self) -> f32 {
        if self.scale.is_nan() { power_of_two(MAX_EXPONENT) } else { self.scale }
    }

    /// The e4m3 code of a number: sign, exponent with a bias of 7, mantissa.
    fn code(self, x: bf16) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let size = nearest_e4m3(x.widen().abs() * self.inverse);
        let code = if size.is_nan() {
            0x7f
        } else if size < 1.0 / 64.0 {
            (size * 512.0) as u8
        } else {
            ((size.to_bits() >> 20) - (120 << 3)) as u8
        };
        sign | code
    }
}

/// Two to the power of the exponent of a normal number.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The nearest e4m3 number to one of at most 448, ties to even. Without branches, so that loops over it vectorise.
#[inline(always)]
fn nearest_e4m3(value: f32) -> f32 {
    // A normal number keeps 3 of its 23 bits of mantissa.
    let bits = value.to_bits();
    let normal = f32::from_bits(bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) & !0xf_ffff);
    // Below 2^-6 the numbers are multiples of 2^-9, which is what the last bit of 2^14 stands for.
    let subnormal = ((value.abs() + 16384.0) - 16384.0).copysign(value);
    if value.abs() < 1.0 / 64.0 { subnormal } else { normal }
}

/// A matrix of BF16 numbers or its transpose, [rows, columns].
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [bf16],
    sizes: [usize; 2],
    /// Elements from one row, and from one column, to the next.
    strides: [usize; 2],
    /// Rows and columns of a block.
    edge: usize,
    /// The scale of all blocks, where they share one.
    scale_of_all: Option<Scale>,
}

impl<'a> Matrix<'a> {
    pub(crate) fn new(values: &'a [bf16], sizes: [usize; 2], block: ScaleBlock) -> Self {
        let scale_of_all = (block == ScaleBlock::Tensor).then(|| Scale::of_all(values));
        Self { values, sizes, strides: [sizes[1], 1], edge: edge_of(block), scale_of_all }
    }

    pub(crate) fn transposed(self) -> Self {
        let Self { sizes: [rows, columns], strides: [row, column], .. } = self;
        Self { sizes: [columns, rows], strides: [column, row], ..self }
    }

    fn at(&self, row: usize, column: usize) -> bf16 {
        self.values[row * self.strides[0] + column * self.strides[1]]
    }

    /// The scale of the block that begins at this row and column.
    pub(crate) fn scale(&self, first_row: usize, first_column: usize) -> Scale {
        let ([rows, columns], edge) = (self.sizes, self.edge);
        self.scale_of_all.unwrap_or_else(|| {
            let bits = (first_row..rows.min(first_row + edge)).flat_map(|row| {
                (first_column..columns.min(first_column + edge))
                    .map(move |column| self.at(row, column).to_bits() & SIZE_BITS)
            });
            Scale::of(bits.max().unwrap_or(0))
        })
    }
}

/// Rows and columns of a block; those of a tile where all blocks share a scale.
fn edge_of(block: ScaleBlock) -> usize {
    if block == ScaleBlock::Square32 { 32 } else { TILE }
}

/// Writes the e4m3 codes of a matrix, row by row.
pub(crate) fn encode(x: Matrix<'_>, codes: &mut [u8]) {
    let Matrix { sizes: [_, columns], edge, .. } = x;
    codes.par_chunks_mut((edge * columns).max(1)).enumerate().for_each_task(|(row_of_blocks, codes)| {
        let first_row = row_of_blocks * edge;
        for first in (0..columns).step_by(edge) {
            let scale = x.scale(first_row, first);
            for (row, codes) in codes.chunks_exact_mut(columns).enumerate() {
                for (column, code) in codes.iter_mut().enumerate().skip(first).take(edge) {
                    *code = scale.code(x.at(first_row + row, column));
                }
            }
        }
    });
}

/// Writes the scale of each row in each 128 columns, [columns / 128, rows].
pub(crate) fn vector_scales(x: Matrix<'_>, scales: &mut [f32]) {
    for (column_of_tiles, scales) in scales.chunks_exact_mut(x.sizes[0].max(1)).enumerate() {
        for (row_of_tiles, scales) in scales.chunks_mut(TILE).enumerate() {
            scales.fill(x.scale(row_of_tiles * TILE, column_of_tiles * TILE).stored());
        }
    }
}

/// Writes the exponents of squares of 32: for each tile of 128 x 128 its 4 x 4 squares row by row, 32 times. What lies
/// outside of the matrix has the exponent of zero.
pub(crate) fn tiled_exponents(x: Matrix<'_>, exponents: &mut [u8]) {
    let tiles_per_row = x.sizes[1].div_ceil(TILE).max(1);
    exponents.par_chunks_exact_mut(32 * 16).enumerate().for_each_task(|(tile, exponents)| {
        let [first_row, first_column] = [tile / tiles_per_row, tile % tiles_per_row].map(|tile| tile * TILE);
        let (first, copies) = exponents.split_at_mut(16);
        for (square, exponent) in first.iter_mut().enumerate() {
            let scale = x.scale(first_row + square / 4 * x.edge, first_column + square % 4 * x.edge);
            *exponent = (scale.stored().to_bits() >> 23) as u8;
        }
        copies.chunks_exact_mut(16).for_each(|copy| copy.copy_from_slice(first));
    });
}
