//! Rotary position embedding on CPU slices. Legend: rows of P = (H + 2K) * E, tables of E / 2 a position.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::buffer::PIECE;
use crate::{Element, HeadLayout};

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
        Arch::new().dispatch(Rotate { qkv, first_row: piece * rows, layout, angles });
    });
}

struct Rotate<'a, E> {
    qkv: &'a mut [E],
    first_row: usize,
    layout: &'a HeadLayout,
    angles: &'a Angles<'a>,
}

impl<E: Element> WithSimd for Rotate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let &HeadLayout { heads, kv_heads, head_size } = self.layout;
        let half = head_size / 2;
        let length = self.angles.cos.len() / half;
        for (row, qkv) in self.qkv.chunks_exact_mut(self.layout.packed_width()).enumerate() {
            let position = (self.first_row + row) % length;
            let cos = &self.angles.cos[position * half..][..half];
            let sin = &self.angles.sin[position * half..][..half];
            for head in qkv.chunks_exact_mut(head_size).take(heads + kv_heads) {
                let (left, right) = head.split_at_mut(half);
                for (((left, right), cos), sin) in left.iter_mut().zip(right).zip(cos).zip(sin) {
                    let (a, b, sin) = (left.widen(), right.widen(), self.angles.direction * sin);
                    *left = E::narrow(a * cos - b * sin);
                    *right = E::narrow(b * cos + a * sin);
                }
            }
        }
    }
}
