//! A single row times a matrix: as fast as the matrix can be read.

use rayon::prelude::*;

use super::Matrix;
use crate::Element;
use crate::cpu::simd::{total, vectorised};

/// Columns of `out` that are one piece of work.
const PIECE: usize = 64;
/// Sums that run beside each other: two vectors of the widest machine. The fewer instructions a cache line takes, the further ahead
/// the processor reads.
const LANES: usize = 32;

/// `out_N = a_K b_KN` with `b` the transpose of stored rows.
pub(super) fn multiply<A: Element, B: Element, O: Element>(a: Matrix<'_, A>, b: Matrix<'_, B>, out: &mut [O]) {
    let depth = a.columns;
    let a = &a.values[..depth];
    out[..b.columns].par_chunks_mut(PIECE).enumerate().for_each(|(piece, out)| {
        vectorised(
            #[inline(always)]
            || {
                for (at, out) in out.iter_mut().enumerate() {
                    let row = &b.values[(piece * PIECE + at) * b.stride..][..depth];
                    *out = O::narrow(dot(a, row));
                }
            },
        );
    });
}

#[inline(always)]
fn dot<A: Element, B: Element>(a: &[A], b: &[B]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for ((sum, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *sum = a.widen().mul_add(b.widen(), *sum);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a.widen() * b.widen()).sum();
    total(lanes) + rest
}
