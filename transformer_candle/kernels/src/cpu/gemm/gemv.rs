//! GEMV: one row times a matrix, as fast as memory delivers the matrix.

use rayon::prelude::*;

use super::matrix::Matrix;
use crate::Element;
use crate::cpu::schedule::ForEachTask;
use crate::cpu::simd::{prefetch_beyond, total, vectorised};

/// Columns of `out` per task: with thousands of columns, dozens of tasks for each thread.
const PIECE: usize = 64;
/// Independent accumulators: two AVX-512 vectors. The fewer instructions per cache line, the further ahead the CPU
/// prefetches.
const ACCUMULATORS: usize = 32;
/// Bytes between a prefetch and its use: hardware prefetches only within a page of 4 KiB, and waits at the next.
const BYTES_AHEAD: usize = 1 << 13;

/// `out_N = a_K b_KN`, where `b` is the transpose of a row-major matrix.
pub(super) fn multiply<A: Element, B: Element, O: Element>(a: Matrix<'_, A>, b: Matrix<'_, B>, out: &mut [O]) {
    let depth = a.columns;
    let a = &a.values[..depth];
    out[..b.columns].par_chunks_mut(PIECE).enumerate().for_each_task(|(piece, out)| {
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
    let mut accumulators = [0f32; ACCUMULATORS];
    let (a_blocks, a_rest) = a.as_chunks::<ACCUMULATORS>();
    let (b_blocks, b_rest) = b.as_chunks::<ACCUMULATORS>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        prefetch_beyond::<B, BYTES_AHEAD>(b);
        for ((sum, a), b) in accumulators.iter_mut().zip(a).zip(b) {
            *sum = a.widen().mul_add(b.widen(), *sum);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a.widen() * b.widen()).sum();
    total(accumulators) + rest
}
