//! Causal attention on CPU slices: tiles of query rows meet tiles of keys with a running maximum and sum (Dao et al.,
//! "`FlashAttention`", arXiv:2205.14135), in f32.
//!
//! Scratch holds a tile's matrices transposed, query rows as columns: `scores_CL` for C keys and L lanes (query rows). So every
//! maximum and sum runs down a column, whole vectors at a time and in the same order on every machine.
//!
//! Every thread has scratch of its own, which its cache holds, and takes tiles one after the other; there is scratch for
//! [`SLOTS`] threads at most. A tile's result does not depend on who computes it.

mod backward;
mod product;
mod tiles;

use pulp::{Arch, Simd, WithSimd};

pub(crate) use backward::{Saved, backward, workspace_elements as backward_workspace_elements};
use product::{COLUMNS, Causal, Start, product};
pub(crate) use tiles::Shape;
use tiles::{KEYS, LANES, Rows, Tile, take, transpose};

use super::disjoint::Disjoint;
use super::exp::exp;
use super::share_out::share_out;
use crate::Element;

/// Threads that take part, at most.
const SLOTS: usize = 64;

/// Attention within packed rows; `shape.past` is 0.
pub(crate) fn forward<E: Element>(
    qkv: &[E],
    documents: Option<&[i32]>,
    shape: &Shape,
    out: &mut [E],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    attend(qkv, documents, shape, |pair| Rows::packed(qkv, shape, pair), out, Some(lse), workspace);
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
    attend(qkv, None, shape, cached, out, None, workspace);
}

/// Elements of workspace for [`forward`] and [`decode`].
pub(crate) fn workspace_elements(shape: &Shape) -> usize {
    slots(shape) * slot_elements(shape)
}

fn slots(shape: &Shape) -> usize {
    SLOTS.min(shape.pairs() * shape.tiles())
}

/// A tile's queries and outputs, scores, copies of keys and of values, and three numbers a row.
fn slot_elements(shape: &Shape) -> usize {
    let size = shape.layout.head_size;
    2 * LANES * size.next_multiple_of(COLUMNS) + KEYS * LANES + 2 * KEYS * size + 3 * LANES
}

fn attend<'a, E: Element>(
    qkv: &[E],
    documents: Option<&[i32]>,
    shape: &Shape,
    keys_and_values: impl Fn(usize) -> [Rows<'a, E>; 2] + Sync,
    out: &mut [E],
    lse: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let (tiles, space) = (shape.tiles(), slot_elements(shape));
    let (out, lse) = (&Disjoint::new(out), lse.map(Disjoint::new));
    let slots = &mut workspace[..slots(shape) * space];
    share_out(shape.pairs() * tiles, 1, 1, slots, space, |tasks, space| {
        for task in tasks {
            // Later tiles meet more keys: the longest of a pair first.
            let (pair, tile) = (task / tiles, tiles - 1 - task % tiles);
            let [keys, values] = keys_and_values(pair);
            let (tile, lse) = (shape.tile(pair, tile), lse.as_ref());
            Arch::new().dispatch(Attend { tile, qkv, documents, keys, values, out, lse, space: &mut *space });
        }
    });
}

struct Attend<'a, E> {
    tile: Tile,
    qkv: &'a [E],
    documents: Option<&'a [i32]>,
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
        let (layout, width) = (tile.shape.layout, tile.width());
        let (size, token) = (layout.head_size, layout.packed_width());
        let padded = size.next_multiple_of(COLUMNS);
        let mut part = |count| take(&mut space, count);
        let (q_EL, rows_LE, scores_CL) = (part(padded * width), part(width * padded), part(KEYS * width));
        let (keys_CE, values_CE) = (part(KEYS * size), part(KEYS * size));
        let mut softmax = Softmax { peak: part(width), sum: part(width), factor: part(width) };

        tile.gather(self.qkv, token, tile.shape.scale(), rows_LE, padded);
        transpose(rows_LE, padded, q_EL);
        // The gathered rows have served; the outputs take their place.
        let out_EL = rows_LE;
        out_EL.fill(0.0);
        // Below any score, and yet a number: before its document a row meets none, and its sums have to stay 0.
        softmax.peak.fill(f32::MIN);
        softmax.sum.fill(0.0);
        for first in (tile.first_key(self.documents)..tile.keys()).step_by(KEYS) {
            let count = KEYS.min(tile.keys() - first);
            let keys = self.keys.left(first, &mut keys_CE[..count * size], size);
            let values_EC = self.values.left(first, &mut values_CE[..count * size], size).transposed();
            let scores_CL = &mut scores_CL[..count * width];
            let edge = tile.edge(first);
            product(simd, [count, width, size], keys, q_EL, scores_CL, Start::Zero, Causal::Target(edge));
            for (row, scores_L) in scores_CL.chunks_exact_mut(width).enumerate() {
                scores_L[..tile.blind(first + row)].fill(f32::NEG_INFINITY);
                scores_L[tile.begun(first + row, self.documents)..].fill(f32::NEG_INFINITY);
            }
            softmax.step(scores_CL);
            let start = Start::Scaled(softmax.factor);
            product(simd, [size, width, count], values_EC, scores_CL, out_EL, start, Causal::Right(edge));
        }
        // SAFETY: a row belongs to one tile, and a tile to one task.
        unsafe { tile.scatter(out_EL, |lane| 1.0 / softmax.sum[lane], self.out, layout.query_width()) };
        let Some(lse) = self.lse else { return };
        for ((place, peak), sum) in tile.places().zip(&*softmax.peak).zip(&*softmax.sum) {
            // SAFETY: as above.
            let lse = unsafe { lse.part(place.statistic(), 1) };
            lse[0] = peak + sum.ln();
        }
    }
}

/// The running softmax: one number a query row.
struct Softmax<'a> {
    /// The largest score met.
    peak: &'a mut [f32],
    /// The sum of `e^(score - peak)`.
    sum: &'a mut [f32],
    /// What sums under the peaks before the last step have to be multiplied with.
    factor: &'a mut [f32],
}

impl Softmax<'_> {
    /// Takes in the scores of more keys and makes them `e^(score - peak)`.
    #[inline(always)]
    fn step(&mut self, scores_CL: &mut [f32]) {
        if self.peak.len() == LANES {
            return self.step_columns::<LANES>(scores_CL, 0);
        }
        for first in (0..self.peak.len()).step_by(COLUMNS) {
            self.step_columns::<COLUMNS>(scores_CL, first);
        }
    }

    /// As [`Self::step`] for W rows, whose numbers stay in registers.
    #[inline(always)]
    fn step_columns<const W: usize>(&mut self, scores_CL: &mut [f32], first: usize) {
        let width = self.peak.len();
        let places = [&mut *self.peak, &mut *self.sum, &mut *self.factor];
        let [peaks, sums, factors] = places.map(|it| it[first..].first_chunk_mut::<W>().expect("W rows"));
        let (before, mut peak, mut sum) = (*peaks, *peaks, *sums);
        for scores in scores_CL.chunks_exact(width) {
            let scores: &[f32; W] = scores[first..].first_chunk().expect("W rows");
            for j in 0..W {
                peak[j] = if scores[j] > peak[j] { scores[j] } else { peak[j] };
            }
        }
        for j in 0..W {
            factors[j] = exp(before[j] - peak[j]);
            sum[j] *= factors[j];
        }
        for scores in scores_CL.chunks_exact_mut(width) {
            let scores: &mut [f32; W] = scores[first..].first_chunk_mut().expect("W rows");
            for j in 0..W {
                scores[j] = exp(scores[j] - peak[j]);
                sum[j] += scores[j];
            }
        }
        (*peaks, *sums) = (peak, sum);
    }
}
