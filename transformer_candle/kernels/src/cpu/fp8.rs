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

    /// Writes the e4m3 code of each number: sign, exponent with a bias of 7, mantissa.
    #[inline(always)]
    fn encode(self, x: &[bf16], codes: &mut [u8]) {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = self.code(x);
        }
    }

    /// The scale beside codes: where nothing fits the largest one, since the codes themselves are NaN.
    pub(crate) fn stored(self) -> f32 {
        if self.scale.is_nan() { power_of_two(MAX_EXPONENT) } else { self.scale }
    }

    /// The code of a number. Without branches, so that loops over it vectorise.
    #[inline(always)]
    fn code(self, x: bf16) -> u8 {
        let value = x.widen().abs() * self.inverse;
        let bits = value.to_bits();
        // A normal number keeps 3 of its 23 bits of mantissa, ties to even.
        let normal = (bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) >> 20).wrapping_sub(BIAS_DIFFERENCE);
        // Below 2^-6 the numbers are multiples of 2^-9, which is what the last bit of 2^14 stands for.
        let subnormal = (value + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
        let code = if value < SMALLEST_NORMAL { subnormal } else { normal };
        let code = if value.is_nan() { NAN } else { code as u8 };
        code | ((x.to_bits() >> 8) as u8 & SIGN)
    }
}

/// Bits of a code.
const SIGN: u8 = 0x80;
const NAN: u8 = 0x7f;
/// The difference of the exponents' biases, 127 and 7, beside 3 bits of mantissa.
const BIAS_DIFFERENCE: u32 = 120 << 3;
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// The number that a code stands for, without its scale.
#[inline(always)]
fn number(code: u8) -> f32 {
    let size = u32::from(code & !SIGN);
    let normal = f32::from_bits((size + BIAS_DIFFERENCE) << 20);
    let value = if size < 8 { size as f32 / 512.0 } else { normal };
    let value = if size == u32::from(NAN) { f32::NAN } else { value };
    if code & SIGN == 0 { value } else { -value }
}

/// Two to the power of the exponent of a normal number.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// A matrix of BF16 numbers or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [bf16],
    /// Rows and columns as they are stored.
    stored_sizes: [usize; 2],
    is_transposed: bool,
    /// Rows and columns of a block.
    edge: usize,
    /// The scale of all blocks, where they share one.
    scale_of_all: Option<Scale>,
}

impl<'a> Matrix<'a> {
    pub(crate) fn new(values: &'a [bf16], sizes: [usize; 2], block: ScaleBlock) -> Self {
        let scale_of_all = (block == ScaleBlock::Tensor).then(|| Scale::of_all(values));
        Self { values, stored_sizes: sizes, is_transposed: false, edge: edge_of(block), scale_of_all }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.oriented(self.stored_sizes)
    }

    /// Exchanges a row and a column of the transpose, or their numbers.
    fn oriented(&self, [row, column]: [usize; 2]) -> [usize; 2] {
        if self.is_transposed { [column, row] } else { [row, column] }
    }

    /// The scale of the block that begins at this row and column.
    pub(crate) fn scale(&self, first_row: usize, first_column: usize) -> Scale {
        let ([rows, columns], [first_row, first_column]) =
            (self.stored_sizes, self.oriented([first_row, first_column]));
        self.scale_of_all.unwrap_or_else(|| {
            let ends = [rows.min(first_row + self.edge), columns.min(first_column + self.edge)];
            // Squares beyond the edge have no numbers.
            let in_row = |row: usize| self.values.get(row * columns + first_column..row * columns + ends[1]);
            Scale::of((first_row..ends[0]).filter_map(in_row).map(largest).max().unwrap_or(0))
        })
    }
}

/// Rows and columns of a block; those of a tile where all blocks share a scale.
fn edge_of(block: ScaleBlock) -> usize {
    if block == ScaleBlock::Square32 { 32 } else { TILE }
}

/// Writes the e4m3 codes of a matrix, row by row.
pub(crate) fn encode(x: Matrix<'_>, codes: &mut [u8]) {
    let (Matrix { values, stored_sizes, edge, is_transposed, .. }, [_, columns]) = (x, x.sizes());
    codes.par_chunks_mut((edge * columns).max(1)).enumerate().for_each_task(|(row_of_blocks, codes)| {
        let first_row = row_of_blocks * edge;
        vectorised(
            #[inline(always)]
            || {
                for first in (0..columns).step_by(edge) {
                    let (scale, block) = (x.scale(first_row, first), first..columns.min(first + edge));
                    for (row, codes) in codes.chunks_exact_mut(columns).enumerate() {
                        let (row, codes) = (first_row + row, &mut codes[block.clone()]);
                        if is_transposed {
                            let column = values[first * stored_sizes[1] + row..].iter().step_by(stored_sizes[1]);
                            codes.iter_mut().zip(column).for_each(|(code, &x)| *code = scale.code(x));
                        } else {
                            scale.encode(&values[row * columns..][block.clone()], codes);
                        }
                    }
                }
            },
        );
    });
}

/// Transposes a matrix of codes of [rows, columns].
pub(crate) fn transpose(codes: &[u8], out: &mut [u8], [rows, columns]: [usize; 2]) {
    out.par_chunks_exact_mut(rows.max(1)).enumerate().for_each_task(|(column, out)| {
        let codes = codes[column..].iter().step_by(columns);
        out.iter_mut().zip(codes).for_each(|(out, &code)| *out = code);
    });
}

/// Scales as [`ScaleBlock::scales`] lays them out.
#[derive(Clone, Copy)]
pub(crate) enum Scales<'a> {
    /// One for all.
    Tensor(f32),
    /// Those of squares of 128, once for each row.
    Vectors { scales: &'a [f32], rows: usize },
    /// The exponents of squares of 32, in tiles.
    Tiles { exponents: &'a [u8], columns: usize },
}

impl Scales<'_> {
    /// The scale of the number at this row and column.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, column: usize) -> f32 {
        match *self {
            Self::Tensor(scale) => scale,
            Self::Vectors { scales, rows } => scales[column / TILE * rows + row],
            Self::Tiles { exponents, columns } => {
                let tile = row / TILE * columns.div_ceil(TILE) + column / TILE;
                let square = row % TILE / 32 * 4 + column % TILE / 32;
                power_of_two(i32::from(exponents[tile * TILE_SCALES + square]) - 127)
            }
        }
    }
}

/// Bytes of a tile's exponents: its 4 x 4 squares, 32 times.
const TILE_SCALES: usize = 32 * 16;

/// Writes the numbers that codes stand for, row by row.
pub(crate) fn decode(codes: &[u8], scales: Scales<'_>, columns: usize, out: &mut [bf16]) {
    let row_length = columns.max(1);
    out.par_chunks_exact_mut(row_length).zip(codes.par_chunks_exact(row_length)).enumerate().for_each_task(
        |(row, (out, codes))| {
            vectorised(
                #[inline(always)]
                || {
                    for (square, (out, codes)) in out.chunks_mut(32).zip(codes.chunks(32)).enumerate() {
                        let scale = scales.at(row, square * 32);
                        for (out, &code) in out.iter_mut().zip(codes) {
                            *out = bf16::narrow(number(code) * scale);
                        }
                    }
                },
            );
        },
    );
}

/// Writes the scale of each row in each 128 columns, [columns / 128, rows].
pub(crate) fn vector_scales([rows, _]: [usize; 2], scale: impl Fn(usize, usize) -> f32 + Sync, scales: &mut [f32]) {
    scales.par_chunks_exact_mut(rows.max(1)).enumerate().for_each_task(|(column_of_tiles, scales)| {
        for (row_of_tiles, scales) in scales.chunks_mut(TILE).enumerate() {
            scales.fill(scale(row_of_tiles * TILE, column_of_tiles * TILE));
        }
    });
}

/// Writes the exponents of squares of 32: for each tile of 128 x 128 its 4 x 4 squares row by row, 32 times. What lies
/// outside of the matrix has the exponent of zero.
pub(crate) fn tiled_exponents(
    [_, columns]: [usize; 2],
    scale: impl Fn(usize, usize) -> f32 + Sync,
    exponents: &mut [u8],
) {
    let tiles_per_row = columns.div_ceil(TILE).max(1);
    exponents.par_chunks_exact_mut(TILE_SCALES).enumerate().for_each_task(|(tile, exponents)| {
        let [first_row, first_column] = [tile / tiles_per_row, tile % tiles_per_row].map(|tile| tile * TILE);
        let (first, copies) = exponents.split_at_mut(16);
        for (square, exponent) in first.iter_mut().enumerate() {
            let scale = scale(first_row + square / 4 * 32, first_column + square % 4 * 32);
            *exponent = (scale.to_bits() >> 23) as u8;
        }
        copies.chunks_exact_mut(16).for_each(|copy| copy.copy_from_slice(first));
    });
}

/// A workspace as BF16 numbers, two for each of its own.
pub(crate) fn as_bf16(words: &mut [f32]) -> &mut [bf16] {
    // SAFETY: f32 and bf16 are plain bits, and the alignment of the latter divides that of the former.
    let (_, numbers, _) = unsafe { words.align_to_mut() };
    numbers
}
