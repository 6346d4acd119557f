//! Rotary position embedding on CPU slices. Legend: rows of P = (H + 2K) * E, tables of E / 2 a position.

use rayon::prelude::*;

use super::schedule::{ForEachTask, rows_per_task};
use super::simd::vectorised;
use crate::{Element, HeadLayout};

/// The tables of one sequence's positions; `direction` is 1 for forward, -1 for backward.
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) direction: f32,
}

pub(crate) fn rotate<E: Element>(qkv: &mut [E], layout: &HeadLayout, angles: &Angles<'_>) {
    let width = layout.packed_width();
    let rows = rows_per_task(width);
    qkv.par_chunks_mut(rows * width).enumerate().for_each_task(|(piece, qkv)| {
        vectorised(
            #[inline(always)]
            || rotate_rows(qkv, piece * rows, layout, angles),
        );
    });
}

#[inline(always)]
fn rotate_rows<E: Element>(qkv: &mut [E], first_row: usize, layout: &HeadLayout, angles: &Angles<'_>) {
    let half = layout.head_size / 2;
    let length = angles.cos.len() / half;
    for (row, qkv) in qkv.chunks_exact_mut(layout.packed_width()).enumerate() {
        let position = (first_row + row) % length;
        let cos = &angles.cos[position * half..][..half];
        let sin = &angles.sin[position * half..][..half];
        let heads = qkv.chunks_exact_mut(layout.head_size).take(layout.heads + layout.kv_heads);
        for head in heads {
            let (left, right) = head.split_at_mut(half);
            let right = &mut right[..half];
            // The compiler does not vectorise a loop over zipped slices here.
            for i in 0..half {
                let (a, b, sin) = (left[i].widen(), right[i].widen(), angles.direction * sin[i]);
                left[i] = E::narrow(a * cos[i] - b * sin);
                right[i] = E::narrow(b * cos[i] + a * sin);
            }
        }
    }
}
