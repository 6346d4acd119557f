//! Rotary position embedding on CPU slices. Legend: rows of P = (H + 2K) * E, tables of E / 2 a position.

use rayon::prelude::*;

use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::{Element, HeadLayout};

/// Pairs that are turned at a time: as whole arrays, so that the compiler need not ask whether they overlap.
const LANES: usize = 16;

/// The tables of the positions of one sequence, and 1 to turn forth or -1 to turn back.
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) direction: f32,
}

pub(crate) fn rotate<E: Element>(qkv: &mut [E], layout: &HeadLayout, angles: &Angles<'_>) {
    let width = layout.packed_width();
    let rows = (PIECE / width).max(1);
    qkv.par_chunks_mut(rows * width).enumerate().for_each(|(piece, qkv)| {
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
            let (lefts, left) = left.as_chunks_mut::<LANES>();
            let (rights, right) = right.as_chunks_mut::<LANES>();
            let ((coses, cos), (sines, sin)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
            for ((left, right), (cos, sin)) in lefts.iter_mut().zip(rights).zip(coses.iter().zip(sines)) {
                let turned: [(E, E); LANES] =
                    std::array::from_fn(|i| turned(left[i], right[i], cos[i], angles.direction * sin[i]));
                *left = turned.map(|(left, _)| left);
                *right = turned.map(|(_, right)| right);
            }
            for ((left, right), (cos, sin)) in left.iter_mut().zip(right).zip(cos.iter().zip(sin)) {
                (*left, *right) = turned(*left, *right, *cos, angles.direction * sin);
            }
        }
    }
}

#[inline(always)]
fn turned<E: Element>(left: E, right: E, cos: f32, sin: f32) -> (E, E) {
    let (a, b) = (left.widen(), right.widen());
    (E::narrow(a * cos - b * sin), E::narrow(b * cos + a * sin))
}
