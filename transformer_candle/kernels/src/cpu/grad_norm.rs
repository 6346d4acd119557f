//! A sum of squares in pieces of fixed size, each summed in f64.

use rayon::prelude::*;

use super::partials::{load, store};
use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::Element;
use crate::buffer::PIECE;

const LANES: usize = 16;

pub(crate) fn forward(grads: &[f32], partials: &mut [f32]) -> f32 {
    let partials = &mut partials[..workspace_elements(grads.len())];
    let pieces = partials.par_chunks_mut(2).zip(grads.par_chunks(PIECE));
    pieces.for_each_task(|(partial, piece)| {
        let sum = vectorised(
            #[inline(always)]
            || sum_of_squares(piece),
        );
        store(partial, sum);
    });
    partials.chunks(2).map(load).sum::<f64>().sqrt() as f32
}

pub(crate) fn workspace_elements(elements: usize) -> usize {
    2 * elements.div_ceil(PIECE)
}

#[inline(always)]
pub(crate) fn sum_of_squares<E: Element>(values: &[E]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value.widen()) * f64::from(value.widen());
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(value.widen()) * f64::from(value.widen());
    }
    lanes.iter().sum()
}
