//! Rounding to e4m3 with block scales on CPU slices. Legend: C columns of a row.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::fp8::ScaleBlock;
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
            let scale = Scale::of(x.par_chunks(PIECE).map(largest).max().unwrap_or(0));
            out.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE)).for_each_task(|(out, x)| {
                vectorised(
                    #[inline(always)]
                    || scale.round(x, out),
                );
            });
        }
        ScaleBlock::Square(edge) => {
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
struct Scale {
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
        let power_of_two = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
        Self { scale: power_of_two(exponent), inverse: power_of_two(-exponent) }
    }

    #[inline(always)]
    fn round(self, x: &[bf16], out: &mut [bf16]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = bf16::narrow(nearest_e4m3(x.widen() * self.inverse) * self.scale);
        }
    }
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
