//! Element-wise sums, in pieces of fixed size.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::buffer::PIECE;

pub(crate) fn forward(sum: &mut [f32], addend: &[f32]) {
    sum.par_chunks_mut(PIECE).zip(addend.par_chunks(PIECE)).for_each_task(|(sum, addend)| {
        vectorised(
            #[inline(always)]
            || {
                for (sum, &value) in sum.iter_mut().zip(addend) {
                    *sum += value;
                }
            },
        );
    });
}
