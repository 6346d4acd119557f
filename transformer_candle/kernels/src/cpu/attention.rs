//! Causal attention on CPU slices: tiles of query rows meet tiles of keys with a running maximum and sum (Dao et al.,
//! "FlashAttention", arXiv:2205.14135), in f32.
//!
//! Scratch holds a tile's matrices transposed, query rows as columns: scores_CL for C keys and L lanes (query rows). So every
//! maximum and sum runs down a column, whole vectors at a time and in the same order on every machine.
//!
//! Tasks are shared out among at most [`SLOTS`] pieces of scratch, whatever the number of threads; a task's result does not
//! depend on its slot.

mod backward;
mod product;
mod tiles;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

pub(crate) use backward::{Saved, backward, workspace_elements as backward_workspace_elements};
use product::{COLUMNS, Left, Start, product};
pub(crate) use tiles::Shape;
use tiles::{ALIGNMENT, Disjoint, KEYS, LANES, Rows, Tile, aligned, take, transpose};

use super::exp::exp;
use crate::Element;

/// Pieces of scratch, and so tasks that run at the same time, at most.
const SLOTS: usize = 64;

/// Attention within packed rows; `shape.past` is 0.
pub(crate) fn forward<E: Element>(qkv: &[E], shape: &Shape, out: &mut [E], lse: &mut [f32], workspace: &mut [f32]) {
    let (size, width) = (shape.layout.head_size, shape.layout.packed_width());
    let keys = |pair: usize| {
        let (sequence, kv_head) = (pair / shape.layout.kv_heads, pair % shape.layout.kv_heads);
        let first = sequence * shape.length * width + (shape.layout.heads + kv_head) * size;
        let rows = Rows { values: qkv, first, stride: width };
        [rows, Rows { first: first + shape.layout.key_width(), ..rows }]
    };
    attend(qkv, shape, keys, out, Some(lse), workspace);
}

/// Appends the keys and values of one sequence's packed rows to the caches, then attends to all that they hold.
pub(crate) fn decode<E: Element>(
    qkv: &[E],
    shape: &Shape,
    keys: &mut [E],
    values: &mut [E],
    out: &mut [E],
    workspace: &mut [f32],
) {
    let (query_width, width) = (shape.layout.query_width(), shape.layout.key_width());
    for (token, qkv) in qkv.chunks_exact(shape.layout.packed_width()).enumerate() {
        let place = (shape.past + token) * width..(shape.past + token + 1) * width;
        keys[place.clone()].copy_from_slice(&qkv[query_width..][..width]);
        values[place].copy_from_slice(&qkv[query_width + width..]);
    }
    let (keys, values) = (&*keys, &*values);
    let cached = |kv_head: usize| {
        let first = kv_head * shape.layout.head_size;
        [keys, values].map(|values| Rows { values, first, stride: width })
    };
    attend(qkv, shape, cached, out, None, workspace);
}

/// Elements of workspace for [`forward`] and [`decode`].
pub(crate) fn workspace_elements(shape: &Shape) -> usize {
    ALIGNMENT + slots(shape) * slot_elements(shape)
}

fn slots(shape: &Shape) -> usize {
    SLOTS.min(shape.pairs() * shape.tiles())
}

/// A tile's queries and outputs, scores, a tile of keys and of values, and three numbers a row.
fn slot_elements(shape: &Shape) -> usize {
    let size = shape.layout.head_size;
    LANES * (size + size.next_multiple_of(COLUMNS)) + KEYS * LANES + 2 * KEYS * size + 3 * LANES
}

fn attend<'a, E: Element>(
    qkv: &[E],
    shape: &Shape,
    keys_and_values: impl Fn(usize) -> [Rows<'a, E>; 2] + Sync,
    out: &mut [E],
    lse: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let (pairs, tiles, slots, space) = (shape.pairs(), shape.tiles(), slots(shape), slot_elements(shape));
    let (out, lse) = (Disjoint::new(out), lse.map(Disjoint::new));
    let slots_of_space = aligned(workspace)[..slots * space].par_chunks_exact_mut(space).with_max_len(1).enumerate();
    slots_of_space.for_each(|(slot, space)| {
        // Later tiles meet more keys: every slot gets long and short ones, the long ones first.
        for task in (slot..pairs * tiles).step_by(slots) {
            let (pair, tile) = (task % pairs, tiles - 1 - task / pairs);
            let [keys, values] = keys_and_values(pair);
            let (tile, out, lse) = (shape.tile(pair, tile), &out, lse.as_ref());
            Arch::new().dispatch(Attend { tile, qkv, keys, values, out, lse, space: &mut *space });
        }
    });
}

struct Attend<'a, E> {
    tile: Tile,
    qkv: &'a [E],
    keys: Rows<'a, E>,
    values: Rows<'a, E>,
    out: &'a Disjoint<'a, E>,
    lse: Option<&'a Disjoint<'a, f32>>,
    space: &'a mut [f32],
}

impl<E: Element> WithSimd for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tile, mut space, .. } = self;
        let layout = tile.shape.layout;
        let (size, width) = (layout.head_size, tile.width());
        let padded = size.next_multiple_of(COLUMNS);
        let (q_EL, rows_LE) = (take(&mut space, size * width), take(&mut space, width * padded));
        let scores_CL = take(&mut space, KEYS * width);
        let (keys_CE, values_CE) = (take(&mut space, KEYS * size), take(&mut space, KEYS * size));
        let (peak_L, sum_L, factor_L) = (take(&mut space, width), take(&mut space, width), take(&mut space, width));

        tile.gather(self.qkv, layout.packed_width(), tile.shape.scale(), rows_LE, padded);
        transpose(rows_LE, padded, size, q_EL);
        // The gathered rows have served; the outputs take their place.
        let out_EL = &mut rows_LE[..size * width];
        out_EL.fill(0.0);
        peak_L.fill(f32::NEG_INFINITY);
        sum_L.fill(0.0);
        for first in (0..tile.keys()).step_by(KEYS) {
            let count = KEYS.min(tile.keys() - first);
            let (keys_CE, values_CE) = (&mut keys_CE[..count * size], &mut values_CE[..count * size]);
            self.keys.widen(first, keys_CE, size);
            self.values.widen(first, values_CE, size);
            let scores_CL = &mut scores_CL[..count * width];
            product(simd, [count, width, size], Left::rows(keys_CE, size), q_EL, scores_CL, Start::Zero);
            for (row, scores_L) in scores_CL.chunks_exact_mut(width).enumerate() {
                scores_L[..tile.blind(first + row)].fill(f32::NEG_INFINITY);
            }
            soften(scores_CL, peak_L, sum_L, factor_L);
            let values_EC = Left::transposed(values_CE, size);
            product(simd, [size, width, count], values_EC, scores_CL, out_EL, Start::Scaled(factor_L));
        }
        for lane in 0..tile.rows {
            // SAFETY: a row belongs to one tile, and a tile to one task.
            let out = unsafe { self.out.part(tile.offset(lane, layout.query_width()), size) };
            let share = 1.0 / sum_L[lane];
            for (out, column_L) in out.iter_mut().zip(out_EL.chunks_exact(width)) {
                *out = E::narrow(column_L[lane] * share);
            }
            if let Some(lse) = self.lse {
                // SAFETY: as above.
                let lse = unsafe { lse.part(tile.statistic(lane), 1) };
                lse[0] = peak_L[lane] + sum_L[lane].ln();
            }
        }
    }
}

/// One step of the running softmax: `scores` become `e^(score - peak)` with the new peaks, and `factor` is what sums under
/// the old peaks have to be multiplied with.
#[inline(always)]
fn soften(scores_CL: &mut [f32], peak_L: &mut [f32], sum_L: &mut [f32], factor_L: &mut [f32]) {
    let width = peak_L.len();
    factor_L.copy_from_slice(peak_L);
    for scores_L in scores_CL.chunks_exact(width) {
        for (peak, &score) in peak_L.iter_mut().zip(scores_L) {
            *peak = if score > *peak { score } else { *peak };
        }
    }
    for ((factor, peak), sum) in factor_L.iter_mut().zip(&*peak_L).zip(&mut *sum_L) {
        *factor = exp(*factor - peak);
        *sum *= *factor;
    }
    for scores_L in scores_CL.chunks_exact_mut(width) {
        for ((score, peak), sum) in scores_L.iter_mut().zip(&*peak_L).zip(&mut *sum_L) {
            *score = exp(*score - peak);
            *sum += *score;
        }
    }
}
